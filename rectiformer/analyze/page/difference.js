// What only one of two models weighs, and what both do.

import { NAMES } from "./attention.js";
import { drawBipartite } from "./bipartite.js";
import { headColor } from "./colors.js";
import { edgeCount, thresholdOf } from "./controls.js";
import { describeRow } from "./details.js";
import { el } from "./dom.js";
import { FRAME, NARROWEST, figure } from "./figure.js";
import { edgesPerRow, ofEachRow, stateOf, strength, strongest } from "./scene.js";
import { plural } from "./text.js";

const GROUPS = { "only-a": "only A", "only-b": "only B", both: "both" };

// sides: two selections with their scenes, whose rows and keys are the same words.
export function difference(context, sides) {
  const state = context.store.get();
  const pairs = comparePairs(sides, state);
  const scenes = sides.map((side) => side.scene);
  const perRow = edgesPerRow(scenes, state, thresholdOf(state));
  const drawn = strongest(ofEachRow(pairs, perRow));
  const why = `the ${perRow} pairs of each row that are strongest for a model`;
  const [scene, kind] = [scenes[0], sides[0].kind];
  const picture = drawBipartite({
    keys: scene.keys,
    rows: scene.rows.map((index) => scene.queries[index]),
    window: scene.keyWindow,
    edges: drawn,
    width: Math.max(NARROWEST, Math.min(900, context.full - FRAME)),
    gutter: { heads: [0, 1], names: ["A", "B"], state: (row, side) => together(scenes[side], row) },
    sums: null,
    names: NAMES[kind],
    hover: (spot) => picture.highlight(spot),
  });
  const sizes = Object.keys(GROUPS).map((group) => pairs.filter((pair) => pair.group === group).length);
  const [onlyA, onlyB, both] = sizes;
  Object.assign(picture.element.dataset, { onlyA, onlyB, both });
  const element = figure({
    title: "Difference",
    name: "difference",
    wide: true,
    body: picture.element,
    note: legend(sizes, edgeCount(context.store, { total: pairs.length, hidden: pairs.length - drawn.length, why }, "pair")),
    table: () => ({
      columns: ["query", "key", "in", "largest weight in A", "in B"],
      rows: pairs.map(({ row, key, group, weights }) => [
        scene.queries[scene.rows[row]].label,
        scene.keys[key].label,
        GROUPS[group],
        ...weights,
      ]),
    }),
  });
  const point = (row) => {
    const at = row - scene.first;
    if (at < 0 || at >= scene.rows.length) return false;
    picture.highlight({ row: at });
    context.say(scenes.map((each, i) => `${"AB"[i]}: ${describeRow(each, at)}`).join(". "));
    return true;
  };
  return { element, point };
}

// "null" where every chosen head of a model is.
function together(scene, row) {
  const states = scene.heads.map((head) => stateOf(scene, row, head));
  return states.length && states.every((state) => state === "null") ? "null" : "active";
}

function groupColors() {
  const muted = getComputedStyle(document.documentElement).getPropertyValue("--muted").trim();
  return { "only-a": headColor(0), "only-b": headColor(1), both: muted };
}

// Every pair that a model weighs, as an edge; weights are the largest of each model's chosen heads, or 0.
function comparePairs(sides, state) {
  const [a, b] = sides.map(({ scene }) => pairsOf(scene, thresholdOf(state)));
  const colors = groupColors();
  return Array.from(new Set([...a.keys(), ...b.keys()]), (name) => {
    const group = a.has(name) ? (b.has(name) ? "both" : "only-a") : "only-b";
    const weights = [a.get(name)?.weight ?? 0, b.get(name)?.weight ?? 0];
    const pair = a.get(name) ?? b.get(name);
    const most = Math.max(...weights.map((weight, side) => strength(sides[side].scene, pair.row, weight)));
    return { ...pair, group, weights, color: colors[group], strength: most, size: 1 + 2.5 * most };
  });
}

// A pair is in a model if any of its chosen heads weighs the key.
function pairsOf(scene, share) {
  const found = new Map();
  scene.cells.forEach((byHead, row) =>
    byHead.forEach(({ keys, weights }, head) =>
      keys.forEach((key, i) => {
        const name = `${row} ${key}`;
        if (strength(scene, row, weights[i]) < share) return;
        if (Math.abs(weights[i]) <= Math.abs(found.get(name)?.weight ?? 0)) return;
        found.set(name, { row, key, head, weight: weights[i] });
      }),
    ),
  );
  return found;
}

function legend(sizes, shown) {
  const colors = groupColors();
  const series = Object.entries(GROUPS).map(([group, text], i) => {
    const line = el("span", { class: `swatch ${group}` });
    line.style.borderTopColor = colors[group];
    return el("span", { class: "series" }, line, `${text}: ${plural(sizes[i], "pair")}`);
  });
  const rule = "A pair counts for a model if any chosen head weighs it; a row is null for it if all of them are.";
  return el("span", { class: "legend" }, series, shown, el("span", { class: "note" }, rule));
}
