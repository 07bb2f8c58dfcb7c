// What the picture of one site shows: its rows after filtering, the window on them, and the edges in it.

import { headColor, weightColor } from "./colors.js";
import { count, number, percent } from "./text.js";
import { membership, rowOfUnit, unitIsNull, unitsOf } from "./units.js";

const WHOLE = 64; // units that are shown without a window
export const WINDOW = 40;
const MOST_EDGES = 6000;
const READABLE = 6; // edges per row that an eye can follow
const FEW = 3;

export const FILTERS = [
  { value: "all", text: "all rows" },
  { value: "every-null", text: "rows where every head is null" },
  { value: "some-null", text: "rows where a chosen head is null" },
];

// What the darkest color stands for. Norms after the heads divide by the size of a whole row, so that a row of small
// weights may count as much as one of large ones.
export const SCALES = [
  { value: "layer", text: "layer", title: "colors up to the largest weight of all heads of this layer here" },
  { value: "row", text: "row", title: "colors up to the largest weight that any head has in the same row" },
];

// All that is known before weights are filtered; `site` is loaded.
export function sceneOf({ example, site, heads }, state) {
  const queries = unitsOf(example, site, "query", state.unit);
  const keys = unitsOf(example, site, "key", state.unit);
  const members = membership(keys, site.keys);
  const indices = filtered(site, queries, heads, state.filter);
  const size = indices.length > WHOLE ? WINDOW : indices.length;
  const first = Math.max(0, Math.min(state.first, indices.length - size));
  const rows = indices.slice(first, first + size);
  const cells = rows.map(
    (index) => new Map(heads.map((head) => [head, rowOfUnit(site, head, queries[index], members)])),
  );
  const scene = { site, heads, queries, keys, members, indices, first, size, rows, cells, byRow: state.scale === "row" };
  const most = largestOf(site, queries, members, state.unit);
  const ends = scene.byRow ? rows.map((index) => largestOfQuery(site, queries[index], members)) : rows.map(() => most);
  return { ...scene, keyWindow: keyWindow(scene, state.keyFirst), most, ends };
}

// The largest absolute weight that any head has in a row.
function largestOfQuery(site, query, members) {
  const sums = new Float64Array(site.keys * 2 + 2);
  const heads = Array.from({ length: site.heads }, (_, head) => largestOfRow(site, head, query, members, sums));
  return Math.max(0, ...heads);
}

// How strong a weight is next to the end of its row's scale: from 0 to 1.
export function strength({ ends }, row, weight) {
  return ends[row] > 0 ? Math.min(1, Math.abs(weight) / ends[row]) : 0;
}

function filtered(site, queries, heads, filter) {
  const all = Array.from(queries.keys());
  const every = Array.from({ length: site.heads }, (_, head) => head);
  if (filter === "every-null")
    return all.filter((index) => every.every((head) => unitIsNull(site, head, queries[index])));
  if (filter === "some-null")
    return all.filter((index) => heads.some((head) => unitIsNull(site, head, queries[index])));
  return all;
}

function keyWindow({ keys, queries, rows, size }, asked) {
  if (keys.length <= WHOLE) return { first: 0, count: keys.length };
  const count = Math.min(keys.length, Math.max(WINDOW, size));
  const along = Math.round(((rows[0] ?? 0) / Math.max(1, queries.length)) * keys.length);
  return { first: Math.max(0, Math.min(asked ?? along, keys.length - count)), count };
}

// The largest absolute weight of all heads, in the units that are shown.
function largestOf(site, queries, members, unit) {
  if (unit === "piece") return site.largest();
  if (site.mostOfWords) return site.mostOfWords;
  const sums = new Float64Array(site.keys * 2 + 2);
  let most = 0;
  for (let head = 0; head < site.heads; head += 1) {
    for (const query of queries) most = Math.max(most, largestOfRow(site, head, query, members, sums));
  }
  site.mostOfWords = most;
  return most;
}

function largestOfRow(site, head, query, members, sums) {
  const touched = [];
  const pieces = query.last - query.first;
  for (let row = site.rowOf(head, query.first); row < site.rowOf(head, query.last); row += 1) {
    for (let at = site.rowStarts[row]; at < site.rowStarts[row + 1]; at += 1) {
      for (const key of members[site.columns[at]]) {
        touched.push(key);
        sums[key] += site.weights[at] / pieces;
      }
    }
  }
  const most = touched.reduce((largest, key) => Math.max(largest, Math.abs(sums[key])), 0);
  for (const key of touched) sums[key] = 0;
  return most;
}

// How many edges of a row are drawn: the strongest one, some, or all; "auto" draws all where that is readable.
export const EDGE_RULES = [
  { value: "auto", text: "auto", title: `all, or where they are many the ${FEW} strongest of each row` },
  { value: "1", text: "1", title: "the strongest of each row" },
  { value: String(FEW), text: String(FEW), title: `the ${FEW} strongest of each row` },
  { value: "all", text: "all", title: "every weight that is not exactly 0" },
];

// The most edges of a row that pictures draw together, so that they can be compared; Infinity for all.
export function edgesPerRow(scenes, { edges }, share) {
  if (edges === "all") return Infinity;
  if (edges !== "auto") return Math.max(1, Number.parseInt(edges, 10) || FEW);
  const crowded = scenes.some((scene) => allEdges(scene, share).length > READABLE * scene.rows.length);
  return crowded ? FEW : Infinity;
}

function allEdges(scene, share) {
  const edges = [];
  scene.cells.forEach((byHead, row) =>
    byHead.forEach(({ keys, weights }, head) =>
      keys.forEach((key, i) => {
        const size = strength(scene, row, weights[i]);
        if (size >= share) edges.push({ row, key, head, weight: weights[i], strength: size });
      }),
    ),
  );
  return edges;
}

// The edges of the window that have at least a `share` of the end of the scale, at most `perRow` of a row, and how many
// there are in all.
export function edgesOf(scene, share, perRow, color) {
  const edges = allEdges(scene, share);
  const chosen = ofEachRow(edges, perRow);
  const kept = strongest(chosen);
  for (const edge of kept) {
    edge.color = color === "head" ? headColor(edge.head) : weightColor(edge.weight, scene.ends[edge.row]);
    edge.size = 1 + 3 * edge.strength;
  }
  const total = scene.cells.reduce(
    (sum, byHead) => Array.from(byHead.values()).reduce((all, { keys }) => all + keys.length, sum),
    0,
  );
  const why = [
    chosen.length < edges.length ? `the ${perRow === 1 ? "strongest" : `${perRow} strongest`} of each row` : "",
    edges.length < total ? `weights of at least ${shareInWords(scene, share)}` : "",
    kept.length < chosen.length ? `the ${count(MOST_EDGES)} strongest of all` : "",
  ];
  return { edges: kept, total, hidden: total - kept.length, why: why.filter(Boolean).join(", ") };
}

// A share of the end of the scale as people read it: a weight, or a part of each row's largest.
export function shareInWords({ byRow, most }, share) {
  return byRow ? `${percent(share)} of the row's largest` : number(share * most);
}

const size = (edge) => edge.strength ?? 0;

// The strongest edges of each row, at most `perRow` of them.
export function ofEachRow(edges, perRow) {
  if (perRow === Infinity) return edges;
  const taken = new Map();
  return [...edges]
    .sort((a, b) => size(b) - size(a))
    .filter(({ row }) => {
      taken.set(row, (taken.get(row) ?? 0) + 1);
      return taken.get(row) <= perRow;
    });
}

// As many edges as a picture holds, the weakest left out.
export function strongest(edges) {
  if (edges.length <= MOST_EDGES) return edges;
  return [...edges].sort((a, b) => size(b) - size(a)).slice(0, MOST_EDGES);
}

// What a query does in a head: "null", "active", or "blind" where it sees no key.
export function stateOf(scene, row, head) {
  const cell = scene.cells[row].get(head);
  if (cell.isNull) return "null";
  return cell.sees > 0 ? "active" : "blind";
}

// How many rows of the chosen heads are null.
export function countNulls(scene) {
  const nulls = (byHead) => Array.from(byHead.values()).filter((cell) => cell.isNull).length;
  return scene.cells.reduce((sum, byHead) => sum + nulls(byHead), 0);
}
