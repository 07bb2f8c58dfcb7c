// A document sentence by sentence: how much attention goes from each to each, and how much of it is null.

import { weightColor } from "./colors.js";
import { el, svg } from "./dom.js";
import { figure } from "./figure.js";
import { number, ordinal, percent } from "./text.js";

const SIDE = 240;
const LEFT = 26;
const STRIP = 10;

// Where each sentence of an axis begins and ends in the matrix; a decoder's keys stand one later, after the start.
function rangesOf(example, site, axis) {
  const own = site.kind === "encoder" || (site.kind === "cross" && axis === "key") || !example.target;
  const shift = site.kind === "decoder" && axis === "key" && example.target ? 1 : 0;
  return ((own ? example.source : example.target).sentences ?? []).map(([first, last]) => [first + shift, last + shift]);
}

// {mass, nulls}: the mean weight that a query of sentence t gives to sentence s, over the chosen heads, as mass[t][s];
// the share of rows of t that are null.
function sumSentences(example, site, heads) {
  const [queries, keys] = ["query", "key"].map((axis) => rangesOf(example, site, axis));
  const sentenceOf = new Int32Array(site.keys).fill(-1);
  keys.forEach(([first, last], s) => sentenceOf.fill(s, first, last));
  const rows = queries.map(([first, last]) => {
    const mass = new Array(keys.length).fill(0);
    let nulls = 0;
    for (const head of heads) {
      for (let query = first; query < last; query += 1) {
        const row = site.rowOf(head, query);
        nulls += site.nulls[row];
        for (let at = site.rowStarts[row]; at < site.rowStarts[row + 1]; at += 1) {
          const s = sentenceOf[site.columns[at]];
          if (s >= 0) mass[s] += site.weights[at];
        }
      }
    }
    const count = Math.max(1, heads.length * (last - first));
    return { mass: mass.map((sum) => sum / count), nulls: nulls / count };
  });
  return { mass: rows.map((row) => row.mass), nulls: rows.map((row) => row.nulls), keys: keys.length };
}

// The matrix as a figure, or null for what is no document; `site` is loaded.
export function sentenceMap({ example, site, heads }) {
  const { mass, nulls, keys } = sumSentences(example, site, heads);
  if (mass.length < 2 || keys < 2) return null;
  const most = mass.flat().reduce((largest, sum) => Math.max(largest, Math.abs(sum)), 0);
  return figure({
    title: "Sentence to sentence",
    name: `sentences-${site.kind}-${ordinal(site.layer)}`,
    note:
      `Mean row sum that goes from a sentence (row) to another (column), chosen heads together, up to ${number(most)}; ` +
      "at the right, the share of null rows. Separators and the end are left out.",
    body: el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Sentences" }, draw({ mass, nulls, keys, most })),
    table: () => ({
      columns: ["sentence", ...Array.from({ length: keys }, (_, s) => `to ${s + 1}`), "null"],
      rows: mass.map((row, t) => [t + 1, ...row, nulls[t]]),
    }),
  });
}

function draw({ mass, nulls, keys, most }) {
  const cell = Math.max(6, Math.min(26, Math.floor(SIDE / Math.max(mass.length, keys))));
  const every = Math.ceil(18 / cell);
  const [width, height] = [LEFT + keys * cell + 6 + STRIP, 20 + mass.length * cell];
  const label = (i, x, y, anchor) =>
    i % every ? null : svg("text", { class: "heading", x, y, "text-anchor": anchor }, String(i + 1));
  return svg(
    "svg",
    { class: "sentence-map", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Sentence to sentence", "data-most": most },
    Array.from({ length: keys }, (_, s) => label(s, LEFT + (s + 0.5) * cell, 13, "middle")),
    mass.map((row, t) =>
      svg(
        "g",
        {},
        label(t, LEFT - 6, 20 + (t + 0.5) * cell + 4, "end"),
        row.map((sum, s) => drawCell(sum, most, { t, s, cell })),
        drawNull(nulls[t], { t, x: LEFT + keys * cell + 6, cell }),
      ),
    ),
  );
}

function drawNull(share, { t, x, cell }) {
  const box = { x, y: 20 + t * cell, width: STRIP, height: cell - 1 };
  return svg(
    "rect",
    { class: "sentence-null", ...box, "fill-opacity": share, "data-null": share },
    svg("title", {}, `sentence ${t + 1}: ${percent(share)} of its rows are null`),
  );
}

function drawCell(sum, most, { t, s, cell }) {
  const box = { x: LEFT + s * cell, y: 20 + t * cell, width: cell - 1, height: cell - 1 };
  return svg(
    "rect",
    {
      class: sum === 0 ? "sentence-cell nothing" : "sentence-cell",
      ...box,
      fill: sum === 0 ? null : weightColor(sum, most),
      "data-from": t,
      "data-to": s,
      "data-mass": sum,
    },
    svg("title", {}, `sentence ${t + 1} to ${s + 1}: ${sum === 0 ? "exactly 0" : number(sum, 4)}`),
  );
}
