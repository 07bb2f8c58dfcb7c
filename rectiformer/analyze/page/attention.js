// One site: its edges, its null queries, the values of a row, and the whole matrix as a map.

import { drawBipartite } from "./bipartite.js";
import {
  colorControl,
  edgeControl,
  edgeCount,
  filterControl,
  headControl,
  kindControl,
  layerControl,
  modelControl,
  scaleControl,
  thresholdControl,
  thresholdOf,
  unitControl,
} from "./controls.js";
import { describeRow, drawDetails } from "./details.js";
import { disclosure, el } from "./dom.js";
import { figure } from "./figure.js";
import { gutterLegend, scaleLegend } from "./legend.js";
import { drawMinimap, isPooled } from "./minimap.js";
import { SITE_TITLES } from "./model.js";
import { countNulls, edgesOf, edgesPerRow, sceneOf, shareInWords, stateOf } from "./scene.js";
import { resolve } from "./selection.js";
import { sentenceMap } from "./sentences.js";
import { brief, count, ordinal, plural } from "./text.js";
import { RULE } from "./units.js";

export const NAMES = {
  cross: { title: SITE_TITLES.cross, keys: "source (keys)", rows: "target (queries)" },
  encoder: { title: SITE_TITLES.encoder, keys: "source (keys)", rows: "source (queries)" },
  decoder: { title: SITE_TITLES.decoder, keys: "generated so far (keys)", rows: "target (queries)" },
};
const STEPS_NOTE = "A row is the decoder step that generates this token.";

// {element, update}: `update` answers changes that need no new page.
export async function attentionView(context) {
  const now = resolve(context);
  if (!now.site) return { element: nothing(now) };
  await now.site.load();
  const scene = sceneOf(now, context.store.get());
  const stage = el("div", { class: "stage" });
  const show = () => stage.replaceChildren(...picture(context, now, scene));
  context.say(`Example ${ordinal(context.store.get().example)}, ${NAMES[now.kind].title}, layer ${ordinal(now.layer)}.`);
  show();
  const element = el("div", { class: "attention" }, sentence(now), controls(context, now, scene), stage);
  return {
    element,
    rows: scene.indices.length,
    inWindow: scene.rows.length,
    arrows: true,
    update: (patch) => update(patch, context, scene, show),
  };
}

function nothing({ example }) {
  return el(
    "p",
    { class: "empty" },
    example
      ? "No attention of this example is in this file."
      : "Nothing to show yet: type a sentence above, or choose an example.",
  );
}

function sentence({ example }) {
  const line = (name, text) =>
    text ? el("p", { class: "sentence" }, el("span", { class: "label" }, name), el("bdi", {}, brief(text, 240))) : null;
  const own = example.forced && example.translation !== null && example.translation !== example.target?.text;
  return el(
    "div",
    { class: "sentences" },
    line("source", example.source.text),
    line(example.forced ? "given target" : "translation", example.target?.text),
    own ? line("model output", example.translation) : null,
  );
}

function controls(context, now, scene) {
  const { store } = context;
  return el(
    "div",
    { class: "controls" },
    el(
      "div",
      { class: "control-row" },
      modelControl(context),
      kindControl(now, store),
      layerControl(now, (layer) => store.set({ layer, heads: now.heads, keyFirst: null })),
      headControl(now, (heads) => store.set({ heads, layer: now.layer }), {
        colored: store.get().color === "head",
        off: context.live?.switchFor(now),
      }),
    ),
    disclosure(
      context,
      "More switches: words, edges, color, scale, rows",
      el(
        "div",
        { class: "control-row" },
        unitControl(store),
        edgeControl(store),
        colorControl(store),
        scaleControl(store),
        filterControl(store),
        thresholdControl(store, (state) => shareInWords(scene, thresholdOf(state))),
      ),
    ),
  );
}

function picture(context, now, scene) {
  const state = context.store.get();
  const share = thresholdOf(state);
  const drawn = edgesOf(scene, share, edgesPerRow([scene], state, share), state.color);
  const details = el("div", { class: "details", tabindex: "0", role: "region", "aria-label": "Weights of the row" });
  const cursor = state.row - scene.first;
  const rest = scene.rows[cursor] === undefined ? undefined : { row: cursor };
  const point = (spot) => {
    art.highlight(spot ?? (context.moved ? rest : null));
    details.replaceChildren(drawDetails(scene, spot ?? rest));
  };
  const art = drawBipartite({
    keys: scene.keys,
    rows: scene.rows.map((index) => scene.queries[index]),
    window: scene.keyWindow,
    edges: drawn.edges,
    width: context.width,
    gutter: { heads: scene.heads, state: (row, head) => stateOf(scene, row, head) },
    said: (row) => describeRow(scene, row),
    sums: scene.heads.length === 1 ? scene.cells.map((byHead) => byHead.get(scene.heads[0]).mass) : null,
    names: NAMES[now.kind],
    hover: point,
    pick: (row) => {
      context.moved = true;
      context.store.set({ row: scene.first + row });
    },
  });
  Object.assign(art.element.dataset, {
    total: drawn.total,
    hidden: drawn.hidden,
    first: scene.first,
    rows: scene.rows.length,
  });
  point(null);
  if (context.moved && rest) bringRowIntoView(context, art.element, rest.row);
  const body = scene.rows.length ? art.element : el("p", { class: "empty" }, "No row fits this filter.");
  const main = figure({
    title: `${SITE_TITLES[now.kind]}, layer ${ordinal(now.layer)}`,
    wide: true,
    body: el("div", {}, body, windowNote(context, scene)),
    note: counts(context.store, drawn, scene, now),
    table: () => edgeTable(scene, drawn),
    name: `${now.kind}-${ordinal(now.layer)}`,
  });
  main.append(
    el("div", { class: "legends" }, scaleLegend(scene, state.unit), gutterLegend()),
    el(
      "p",
      { class: "note" },
      [state.unit === "word" ? RULE : "", now.kind === "encoder" ? "" : STEPS_NOTE].join(" ").trim(),
    ),
  );
  const row = el("section", { class: "figure" }, el("h2", { class: "figure-title" }, "Row"), details);
  const maps = [sentenceMap(now), map(context, now, scene)].filter(Boolean);
  return [main, el("aside", {}, scene.rows.length < scene.indices.length ? [...maps, row] : [row, ...maps])];
}

// After a row was chosen: the page follows, and a screen reader hears the row.
function bringRowIntoView({ say }, drawing, row) {
  const label = drawing.querySelector(`.rows [data-row="${row}"]`);
  requestAnimationFrame(() => label.scrollIntoView({ block: "nearest" }));
  say(label.dataset.said);
}

function counts(store, drawn, scene, { site }) {
  const nulls = countNulls(scene);
  const rows =
    scene.rows.length === scene.queries.length
      ? ""
      : `rows: ${count(scene.rows.length)} of ${count(scene.queries.length)} \u00b7 `;
  return el(
    "span",
    { class: "counts", "data-nulls": nulls, "data-total": drawn.total, "data-hidden": drawn.hidden },
    edgeCount(store, drawn),
    ` \u00b7 ${plural(nulls, "null row")} \u00b7 ${rows}heads: ${scene.heads.length} of ${site.heads}`,
  );
}

function windowNote(context, scene) {
  if (scene.rows.length === scene.indices.length) return null;
  const shift = (by) => () =>
    context.store.set({ first: Math.max(0, scene.first + by), row: Math.max(0, scene.first + by), keyFirst: null });
  const button = (text, by) =>
    el("button", { type: "button", class: "quiet", "data-value": text, on: { click: shift(by) } }, text);
  return el(
    "div",
    { class: "window-note" },
    button("\u2191 earlier", -scene.size),
    `rows ${count(scene.first + 1)}\u2013${count(scene.first + scene.rows.length)} of ${count(scene.indices.length)}`,
    button("later \u2193", scene.size),
  );
}

function map(context, now, scene) {
  const { rows, queries, keys, keyWindow, first, size } = scene;
  const windowed = rows.length < scene.indices.length || keyWindow.count < keys.length;
  const box =
    windowed && rows.length
      ? {
          firstQuery: queries[rows[0]].first,
          lastQuery: queries[rows.at(-1)].last,
          firstKey: keys[keyWindow.first].first,
          lastKey: keys[keyWindow.first + keyWindow.count - 1].last,
        }
      : null;
  const unitAt = (units, index) =>
    Math.max(
      0,
      units.findIndex((unit) => unit.last > index),
    );
  const move = (query, key) => {
    const start = Math.max(
      0,
      scene.indices.findIndex((index) => index >= unitAt(queries, query)) - Math.floor(size / 2),
    );
    context.store.set({
      first: start,
      row: start,
      keyFirst: Math.max(0, unitAt(keys, key) - Math.floor(keyWindow.count / 2)),
    });
  };
  return figure({
    title: "Whole matrix",
    name: `map-${now.kind}-${ordinal(now.layer)}`,
    body: drawMinimap({ site: now.site, heads: now.heads, box, move: windowed ? move : null }),
    note: mapNote(now.site, windowed, first),
    table: () => headTable(now.site),
  });
}

function mapNote(site, windowed, first) {
  const pooled = isPooled(site) ? " A dot is the largest weight it covers." : "";
  const moving = windowed ? ` Click to move the window (now from row ${count(first + 1)}).` : "";
  return `${count(site.queries)} \u00d7 ${count(site.keys)} pieces; rows are queries.${pooled}${moving}`;
}

// Every edge that is drawn and every null row, as a table.
export function edgeTable(scene, { edges }) {
  const query = (row) => [ordinal(scene.rows[row]), scene.queries[scene.rows[row]].label];
  const rows = edges.map(({ row, key, head, weight }) => [
    ...query(row),
    ordinal(key),
    scene.keys[key].label,
    ordinal(head),
    weight,
  ]);
  scene.cells.forEach((byHead, row) =>
    byHead.forEach((cell, head) => {
      if (cell.isNull) rows.push([...query(row), "", "null", ordinal(head), 0]);
    }),
  );
  return {
    columns: ["row", "query", "key position", "key", "head", "weight"],
    rows: rows.sort((a, b) => a[0] - b[0] || a[4] - b[4] || a[2] - b[2]),
  };
}

function headTable(site) {
  const rows = Array.from({ length: site.heads }, (_, head) => {
    const { queries, nulls, seen, edges } = site.counts(head);
    return [ordinal(head), queries, nulls, seen, edges];
  });
  return { columns: ["head", "queries", "null", "keys seen", "non-zero"], rows };
}

// Threshold and cursor change the picture only; true if that was all.
function update(patch, context, scene, show) {
  const names = Object.keys(patch);
  const { row } = context.store.get();
  const inside = row >= scene.first && row < scene.first + scene.rows.length;
  if (names.every((name) => name === "threshold") || (names.every((name) => name === "row") && inside)) {
    show();
    return true;
  }
  return false;
}
