"""The papers' claims as studies: trainings, measures, tables and figures, each from one command."""
