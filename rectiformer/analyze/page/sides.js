// Two models side by side, pointed at together.

import { NAMES, edgeTable } from "./attention.js";
import { drawBipartite } from "./bipartite.js";
import { thresholdOf } from "./controls.js";
import { drawDetails } from "./details.js";
import { el } from "./dom.js";
import { figure } from "./figure.js";
import { gutterLegend, scaleLegend } from "./legend.js";
import { countNulls, edgesOf, stateOf } from "./scene.js";
import { brief, count, ordinal, plural } from "./text.js";

const LETTERS = "AB";

// sides: two selections with their scenes; `same` says whether their rows are the same words.
export function sideBySide(context, sides, same) {
  const panels = [];
  const point = (from) => (spot) => panels.forEach((panel, i) => panel.show(i === from ? spot : elsewhere(spot, same)));
  for (const side of sides) panels.push(drawSide(context, side, point(panels.length)));
  return el(
    "div",
    { class: "pair" },
    panels.map((panel) => panel.element),
  );
}

// What a spot in one picture is in the other: the same row where rows are the same, else the same source word.
function elsewhere(spot, same) {
  if (same && spot?.row !== undefined) return { row: spot.row };
  return spot?.key === undefined ? null : { key: spot.key };
}

function drawSide(context, side, hover) {
  const { scene, example, kind } = side;
  const state = context.store.get();
  const drawn = edgesOf(scene, thresholdOf(state, scene.most), "weight");
  const picture = drawBipartite({
    keys: scene.keys,
    rows: scene.rows.map((index) => scene.queries[index]),
    window: scene.keyWindow,
    edges: drawn.edges,
    width: widthOfOne(context.full),
    gutter: { heads: scene.heads, state: (row, head) => stateOf(scene, row, head) },
    sums: null,
    names: NAMES[kind],
    hover,
  });
  const details = el("div", { class: "details small", "aria-live": "polite" }, drawDetails(scene, null));
  const element = frameOf(side, drawn, picture.element);
  const own = example.translation ?? (example.forced ? null : example.target?.text);
  element.append(
    own ? sentence("model output", own) : "",
    el("div", { class: "legends" }, scaleLegend(scene, state.unit), gutterLegend()),
    details,
  );
  const show = (spot) => {
    picture.highlight(spot);
    details.replaceChildren(drawDetails(scene, spot));
  };
  return { element, show };
}

// Of one picture: half of the width or, where that is too little for two (as style.css says), all of it.
function widthOfOne(full) {
  const half = Math.floor((full - 90) / 2);
  return half >= 405 ? half : Math.max(405, Math.min(880, full - 40));
}

function frameOf({ model, book, layer, scene }, drawn, body) {
  const counts = `${plural(drawn.total, "edge")}, ${plural(countNulls(scene), "null row")}; `;
  const hidden = `${count(drawn.hidden)} of ${count(drawn.total)} edges hidden`;
  return figure({
    title: `${LETTERS[model]} \u00b7 ${book.name}, layer ${ordinal(layer)}`,
    name: `compare-${LETTERS[model]}`,
    body,
    note: el("span", {}, counts, el("span", { class: drawn.hidden ? "warn" : "" }, hidden)),
    table: () => edgeTable(scene, drawn),
  });
}

function sentence(label, text) {
  return el("p", { class: "sentence" }, el("span", { class: "label" }, label), el("bdi", {}, brief(text, 400)));
}
