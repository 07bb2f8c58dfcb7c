// The test set: sparsity, null rate, diversity and alignment error by layer and kind, against length, and memories.

import { chart } from "./charts.js";
import { el } from "./dom.js";
import { tableOf } from "./figure.js";
import { SITES } from "./model.js";
import { brief, ordinal, percent } from "./text.js";

const BY_HEAD = [
  ["sparsity", "Zeros", "share of visible keys with weight exactly 0", 1],
  ["null_rate", "Null rows", "share of queries that weigh no key", 1],
  ["mass", "Row sum", "mean sum of a row's weights (softmax: 1)", null],
  ["entropy", "Entropy", "mean over rows that are not null (nats)", null],
];
const DIVERSITY = [
  ["js", "Diversity", "JS divergence (nats) of the heads, null rows left out"],
  ["js_zero", "Diversity, null as zero", "JS divergence (nats), null rows as zero vectors"],
  ["support_overlap", "Support overlap", "how far heads weigh the same keys"],
];
const MEMORY = [
  ["variance_ratio", "Variance ratio", "of a memory's output to the stream it is added to"],
  ["used_slots", "Used slots", "share of slots ever active"],
  ["usage_entropy", "Usage entropy", "how evenly slots are used"],
  ["anisotropy", "Anisotropy", "of the slots' values"],
];

export async function dashboardView(context) {
  const models = context.findings
    .map((findings, index) => ({ findings, index, name: nameOf(context, findings, index) }))
    .filter(({ findings }) => findings);
  if (!models.length)
    return {
      element: el(
        "p",
        { class: "empty" },
        "This file has no findings over a test set. Make a report with rectiformer analyze to have them here.",
      ),
    };
  const section = (title, note, charts) => {
    const drawn = charts.filter(Boolean);
    return drawn.length
      ? el(
          "section",
          { class: "board" },
          el("h2", {}, title),
          note ? el("p", { class: "note" }, note) : null,
          el("div", { class: "figures" }, drawn),
        )
      : null;
  };
  const dots = "Lines are means over the heads of a layer, dots are heads.";
  return {
    element: el(
      "div",
      { class: "boards" },
      context.summary ? glance(context.summary) : null,
      ...BY_HEAD.map(([key, title, note, high]) =>
        section(
          title,
          `${capital(note)}. ${dots}`,
          SITES.map((kind) => byHead(models, kind, key, title, high)),
        ),
      ),
      section(
        "Diversity",
        "How much the heads of a layer differ.",
        DIVERSITY.flatMap(([key, title, note]) => SITES.map((kind) => diversity(models, kind, key, title, note))),
      ),
      section(
        "Alignment error by layer",
        "Best head and mean of the heads, rows taken where a word is generated (normal) or read as input (shifted).",
        models.map(alignment),
      ),
      section("Against length", "By length of the source in pieces; one line per layer.", models.flatMap(byLength)),
      section(
        "Own sources and others",
        "The same targets with their own source vs. the source of another sentence.",
        shuffled(models),
      ),
      section("Memories", "Feed-forward layers as key-value memories.", memories(models)),
    ),
  };
}

function nameOf({ findings: all }, findings, index) {
  const own = findings?.model?.name || "model";
  return all.filter(Boolean).length > 1 ? `${"AB"[index]} \u00b7 ${own}` : own;
}

function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

function mean(values) {
  const known = values.filter(Number.isFinite);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function layersOf(models, kind) {
  return Array.from(
    new Set(
      models.flatMap(({ findings }) => findings.sites.filter((site) => site.kind === kind).map((site) => site.layer)),
    ),
  ).sort((a, b) => a - b);
}

function siteOf({ findings }, kind, layer) {
  return findings.sites.find((site) => site.kind === kind && site.layer === layer);
}

// What `rectiformer analyze` prints, in its words and digits.
function glance({ data, measures, measure_columns, distances, distance_columns, distances_title, bleu }) {
  return el(
    "section",
    { class: "figure wide", id: "glance" },
    el("h2", {}, "At a glance"),
    el("p", { class: "note" }, brief(data)),
    tableOf({ columns: measure_columns, rows: measures, numbers: measure_columns.slice(2, 8), label: "Measures" }),
    distances.length
      ? [
          el("p", { class: "note" }, distances_title),
          tableOf({ columns: distance_columns, rows: distances, numbers: distance_columns.slice(1), label: "Distances" }),
        ]
      : null,
    bleu ? el("p", { class: "note" }, brief(bleu)) : null,
  );
}

function byHead(models, kind, key, title, high) {
  const layers = layersOf(models, kind);
  const series = models.map((model) => {
    const heads = layers.map((layer) => siteOf(model, kind, layer)?.[key] ?? []);
    return { name: models.length > 1 ? model.name : "", look: model.index, values: heads.map(mean), heads };
  });
  return chart({ title: `${title}, ${kind}`, categories: layers.map(ordinal), axis: "layer", series, high });
}

function diversity(models, kind, key, title, note) {
  const layers = layersOf(models, kind);
  const series = models.map((model) => ({
    name: models.length > 1 ? model.name : "",
    look: model.index,
    values: layers.map((layer) => siteOf(model, kind, layer)?.diversity?.[key] ?? null),
  }));
  return chart({ title: `${title}, ${kind}`, note, categories: layers.map(ordinal), axis: "layer", series });
}

function alignment({ findings, name }) {
  const rows = findings.alignment ?? [];
  const layers = Array.from(new Set(rows.map((row) => row.layer))).sort((a, b) => a - b);
  const least = (layer, induction, average) => {
    const fit = rows.filter(
      (row) => row.layer === layer && row.induction === induction && (row.head === "average") === average,
    );
    return fit.length ? Math.min(...fit.map((row) => row.aer)) : null;
  };
  const series = ["normal", "shifted"].flatMap((induction) =>
    [false, true].map((average) => ({
      name: `${induction}, ${average ? "mean of heads" : "best head"}`,
      values: layers.map((layer) => least(layer, induction, average)),
    })),
  );
  return chart({ title: `AER, ${name}`, categories: layers.map(ordinal), axis: "layer", series });
}

function byLength({ findings, name }) {
  const measures = [
    ["sparsity", "Zeros"],
    ["null_rate", "Null rows"],
  ];
  return measures.flatMap(([key, title]) =>
    SITES.map((kind) => {
      const sites = findings.by_length.filter((site) => site.kind === kind);
      return chart({
        title: `${title}, ${kind}, ${name}`,
        categories: (sites[0]?.rows ?? []).map((_, i) => binName(sites[0].lengths, i)),
        axis: "source pieces",
        high: 1,
        series: sites.map((site) => ({
          name: `layer ${ordinal(site.layer)}`,
          look: site.layer,
          values: site[key].map((value, i) => (site.rows[i] ? value : null)),
        })),
      });
    }),
  );
}

function binName(edges, i) {
  const [first, after] = [edges[i], edges[i + 1]];
  if (after === undefined) return `\u2265${first}`;
  return after - first === 1 ? String(first) : `${first}\u2013${after - 1}`;
}

function shuffled(models) {
  const known = models.filter(({ findings }) => findings.shuffled);
  const series = (key) =>
    known.flatMap(({ findings, name, index }) =>
      ["gold", "shuffled"].map((which, i) => ({
        name: `${which === "gold" ? "own source" : "another"}${models.length > 1 ? `, ${name}` : ""}`,
        look: index * 2 + i,
        values: findings.shuffled[which][key],
      })),
    );
  const layers = Math.max(0, ...known.map(({ findings }) => findings.shuffled.gold.mass.length));
  return [
    ["null_rate", "Null rows", 1],
    ["mass", "Row sum", null],
  ].map(([key, title, high]) =>
    chart({
      title: `${title}, by source`,
      categories: Array.from({ length: layers }, (_, layer) => ordinal(layer)),
      axis: "layer",
      high,
      series: series(key),
    }),
  );
}

function memories(models) {
  const sides = ["encoder", "decoder"];
  const layers = Array.from(
    new Set(models.flatMap(({ findings }) => findings.memories.map((memory) => memory.layer))),
  ).sort((a, b) => a - b);
  const series = (read) =>
    models.flatMap((model) =>
      sides.map((side, i) => ({
        name: models.length > 1 ? `${side}, ${model.name}` : side,
        look: model.index * 2 + i,
        values: layers.map(
          (layer) =>
            read(model.findings.memories.find((memory) => memory.side === side && memory.layer === layer) ?? {}) ??
            null,
        ),
      })),
    );
  const ratios = Array.from(
    new Set(
      models.flatMap(({ findings }) =>
        findings.memories.flatMap((memory) => Object.keys(memory.top_score_ratio ?? {})),
      ),
    ),
  );
  return [
    ...MEMORY.map(([key, title, note]) =>
      chart({ title, note, categories: layers.map(ordinal), axis: "layer", series: series((memory) => memory[key]) }),
    ),
    ...ratios.map((share) =>
      chart({
        title: `Top scores, ${percent(Number(share))} of slots`,
        note: "share of the score mass they hold",
        categories: layers.map(ordinal),
        axis: "layer",
        series: series((memory) => memory.top_score_ratio?.[share]),
        high: 1,
      }),
    ),
  ];
}
