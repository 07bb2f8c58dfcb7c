"""One study run by itself."""

from rectiformer.studies.running import run_studies


def run_study(study, scale, out, **how):
    return run_studies([(study, scale)], out, **how)[0]
