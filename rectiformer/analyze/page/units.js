// Rows and columns as pieces or as words. A word's row is the mean over its pieces, its column the sum over them.

import { wordTexts } from "./text.js";

const SPACE = "\u2581"; // how a piece marks the space before a word; alone, it belongs to no word

export const RULE =
  "Words: sum over source (key) pieces, mean over target (query) pieces; null when all of a word's pieces are.";

// What stands at one axis of a site: [{label, first, last, word, special}], positions first up to last of the matrix.
export function unitsOf(example, site, axis, mode) {
  const own = site.kind === "encoder" || (site.kind === "cross" && axis === "key") || !example.target;
  const side = own ? example.source : example.target;
  const shift = site.kind === "decoder" && axis === "key" && example.target ? 1 : 0;
  const length = axis === "key" ? site.keys : site.queries;
  const pieces = Array.from({ length }, (_, position) => pieceUnit(side, position, shift));
  return mode === "piece" ? pieces : merged(side, pieces, shift);
}

function pieceUnit(side, position, shift) {
  const piece = side.pieces[position - shift];
  const unit = { first: position, last: position + 1, word: -1 };
  if (position < shift) return { ...unit, label: "start", special: true };
  if (!piece) return { ...unit, label: "end", special: true };
  const end = position - shift === side.pieces.length - 1 && piece[1] === piece[2];
  if (end) return { ...unit, label: "end", special: true };
  return piece[0] === SPACE ? { ...unit, label: "space", special: true } : { ...unit, label: piece[0] };
}

function merged(side, pieces, shift) {
  const free = new Set(pieces.keys());
  const labels = wordTexts(side);
  const units = [];
  side.words.forEach(([first, last], word) => {
    for (let position = first; position < last; position += 1) free.delete(position + shift);
    units.push({
      label: labels[word],
      first: first + shift,
      last: Math.min(last + shift, pieces.length),
      word,
    });
  });
  const rest = Array.from(free, (position) => pieces[position]);
  return [...units, ...rest].sort((a, b) => a.first - b.first || a.last - b.last || a.word - b.word);
}

// For each position of the axis, the units it belongs to.
export function membership(units, length) {
  const members = Array.from({ length }, () => []);
  units.forEach((unit, index) => {
    for (let position = unit.first; position < unit.last; position += 1) members[position].push(index);
  });
  return members;
}

// One head's row for a query unit: {keys, weights, mass, isNull, sees}, keys as indices into the key units.
export function rowOfUnit(site, head, unit, members) {
  const sums = new Map();
  const row = { mass: 0, sees: 0, isNull: false };
  const pieces = unit.last - unit.first;
  let nulls = 0;
  for (let query = unit.first; query < unit.last; query += 1) {
    const index = site.rowOf(head, query);
    row.mass += site.mass[index] / pieces;
    row.sees = Math.max(row.sees, site.visible[index]);
    nulls += site.nulls[index];
    for (let at = site.rowStarts[index]; at < site.rowStarts[index + 1]; at += 1) {
      for (const key of members[site.columns[at]]) sums.set(key, (sums.get(key) ?? 0) + site.weights[at] / pieces);
    }
  }
  const keys = Array.from(sums.keys())
    .filter((key) => sums.get(key) !== 0)
    .sort((a, b) => a - b);
  return { ...row, keys, weights: keys.map((key) => sums.get(key)), isNull: pieces > 0 && nulls === pieces };
}

// Whether a query unit is null in a head, without looking at weights.
export function unitIsNull(site, head, unit) {
  for (let query = unit.first; query < unit.last; query += 1) {
    if (!site.isNull(head, query)) return false;
  }
  return unit.last > unit.first;
}
