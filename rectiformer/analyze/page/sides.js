// Two models side by side, pointed at together.

import { NAMES, edgeTable } from "./attention.js";
import { drawBipartite } from "./bipartite.js";
import { edgeCount, thresholdOf } from "./controls.js";
import { describeRow, drawDetails } from "./details.js";
import { el } from "./dom.js";
import { FRAME, NARROWEST, figure } from "./figure.js";
import { gutterLegend, scaleLegend } from "./legend.js";
import { countNulls, edgesOf, edgesPerRow, stateOf } from "./scene.js";
import { brief, ordinal, plural } from "./text.js";

const LETTERS = "AB";

// sides: two selections with their scenes; `same` says whether their rows are the same words.
export function sideBySide(context, sides, same) {
  const panels = [];
  const point = (from) => (spot) => panels.forEach((panel, i) => panel.show(i === from ? spot : elsewhere(spot, same)));
  const state = context.store.get();
  const scenes = sides.map(({ scene }) => scene);
  const perRow = edgesPerRow(scenes, state, thresholdOf(state)); // the same for both, to be compared
  for (const side of sides) panels.push(drawSide(context, side, perRow, point(panels.length)));
  const element = el(
    "div",
    { class: "pair" },
    panels.map((panel) => panel.element),
  );
  return { element, point: (row) => pointByKey(context, sides, row, point(state.model)) };
}

// The arrow keys are on row `row` of the chosen model; false where that is outside of the window.
function pointByKey(context, sides, row, point) {
  const { scene } = sides[context.store.get().model];
  const at = row - scene.first;
  if (at < 0 || at >= scene.rows.length) return false;
  point({ row: at });
  context.say(sides.map(({ scene: each }, i) => (each.cells[at] ? `${LETTERS[i]}: ${describeRow(each, at)}` : "")).join(". "));
  return true;
}

// What a spot in one picture is in the other: the same row where rows are the same, else the same source word.
function elsewhere(spot, same) {
  if (same && spot?.row !== undefined) return { row: spot.row };
  return spot?.key === undefined ? null : { key: spot.key };
}

function drawSide(context, side, perRow, hover) {
  const { scene, example, kind } = side;
  const state = context.store.get();
  const drawn = edgesOf(scene, thresholdOf(state), perRow, "weight");
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
  const details = el(
    "div",
    { class: "details small", tabindex: "0", role: "region", "aria-label": `Weights of the row in ${LETTERS[side.model]}` },
    drawDetails(scene, null),
  );
  const element = frameOf(context.store, side, drawn, picture.element);
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
  return half >= 405 ? half : Math.max(NARROWEST, Math.min(880, full - FRAME));
}

function frameOf(store, { model, book, layer, scene }, drawn, body) {
  return figure({
    title: `${LETTERS[model]} \u00b7 ${book.name}, layer ${ordinal(layer)}`,
    name: `compare-${LETTERS[model]}`,
    body,
    note: el("span", { class: "counts" }, edgeCount(store, drawn), ` \u00b7 ${plural(countNulls(scene), "null row")}`),
    table: () => edgeTable(scene, drawn),
  });
}

function sentence(label, text) {
  return el("p", { class: "sentence" }, el("span", { class: "label" }, label), el("bdi", {}, brief(text, 400)));
}
