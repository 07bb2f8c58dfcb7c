// The row under the pointer or the cursor, as values: raw weights, row sums, null.

import { headColor, weightColor } from "./colors.js";
import { el } from "./dom.js";
import { strength } from "./scene.js";
import { brief, count, number, ordinal, plural } from "./text.js";

const TOP = 6;

// The panel for one row of a scene, or for what a pointer is on: spot {row, key, head, weight}.
export function drawDetails(scene, spot) {
  if (spot?.row === undefined && spot?.key !== undefined) return keyDetails(scene, spot.key);
  const row = spot?.row;
  if (row === undefined || !scene.cells[row]) return el("p", { class: "note" }, "Point at a row.");
  const unit = scene.queries[scene.rows[row]];
  const edge =
    spot.weight === undefined
      ? null
      : el(
          "p",
          { class: "edge-note" },
          `head ${ordinal(spot.head)}: weight `,
          el("b", {}, number(spot.weight, 5)),
          " on ",
          el("bdi", { class: "quoted" }, brief(scene.keys[spot.key].label, 60)),
        );
  const lists = Array.from(scene.cells[row], ([head, cell]) => headDetails(scene, row, head, cell));
  return el("div", { "data-row": scene.rows[row] }, title(unit, scene.rows[row], "row"), edge, lists);
}

// A row in one sentence, for those who hear it.
export function describeRow(scene, row) {
  const heads = Array.from(scene.cells[row], ([head, { isNull, keys, weights }]) => {
    if (isNull || !keys.length) return `head ${ordinal(head)} null`;
    const best = keys.reduce((most, _, i) => (Math.abs(weights[i]) > Math.abs(weights[most]) ? i : most), 0);
    const label = brief(scene.keys[keys[best]].label, 40);
    return `head ${ordinal(head)} ${plural(keys.length, "key")}, most ${label} ${number(weights[best])}`;
  });
  return `row ${ordinal(scene.rows[row])}, ${brief(scene.queries[scene.rows[row]].label, 40)}: ${heads.join("; ")}`;
}

function title(unit, index, noun) {
  return el(
    "p",
    { class: "details-title" },
    el("bdi", {}, brief(unit.label, 200)),
    el("span", { class: "note" }, ` ${noun} ${ordinal(index)}`),
  );
}

function headDetails(scene, row, head, cell) {
  const dot = el("span", { class: "dot" });
  dot.style.background = headColor(head);
  const facts = cell.isNull
    ? el("span", { class: "null-word" }, "null: weighs no key")
    : `sum ${number(cell.mass, 4)} \u00b7 ${plural(cell.keys.length, "key")}`;
  const order = Array.from(cell.keys.keys()).sort((a, b) => Math.abs(cell.weights[b]) - Math.abs(cell.weights[a]));
  const more = order.length - TOP;
  return el(
    "div",
    { class: "head-details", "data-head": head, "data-mass": cell.mass, "data-null": cell.isNull ? "1" : "0" },
    el("p", {}, dot, el("b", {}, `head ${ordinal(head)} `), facts),
    order.length
      ? el(
          "ol",
          {},
          order.slice(0, TOP).map((i) => bar(scene, row, cell.keys[i], cell.weights[i])),
          more > 0 ? el("li", { class: "note" }, `and ${count(more)} more`) : null,
        )
      : null,
  );
}

function bar(scene, row, key, weight) {
  const strip = el("span", { class: "bar" });
  strip.style.width = `${Math.max(2, 70 * strength(scene, row, weight))}px`;
  strip.style.background = weightColor(weight, scene.ends[row]);
  return el(
    "li",
    { class: "weight-line" },
    el("bdi", { class: "weight-key" }, brief(scene.keys[key].label, 40)),
    strip,
    el("span", { class: "weight-number" }, number(weight, 4)),
  );
}

function keyDetails(scene, key) {
  let received = 0;
  let edges = 0;
  scene.cells.forEach((byHead) =>
    byHead.forEach((cell) => {
      const at = cell.keys.indexOf(key);
      if (at < 0) return;
      edges += 1;
      received += cell.weights[at];
    }),
  );
  return el(
    "div",
    {},
    title(scene.keys[key], key, "key"),
    el("p", { class: "note" }, `${plural(edges, "edge")} from the rows shown, ${number(received, 4)} in all.`),
  );
}
