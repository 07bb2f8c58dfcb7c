// Keys on the left, queries on the right, a curve for every weight that is not zero, and a gutter for null queries.

import { svg } from "./dom.js";
import { fit, isRightToLeft, number, ordinal, visible } from "./text.js";

const LINE = 25;
const TOP = 44;
const ZONE = 84; // height into which the keys before or after the window are squeezed
const CELL = 15; // of the null column, per head
const SMALLEST_CELL = 6; // where marks would be smaller, they are counted
const NARROW = 420;
const TALL = 15; // rows

// Draw a picture and return {element, highlight}.
//
// keys, rows: units; window: {first, count} of the keys that get a line each;
// edges: [{row, key, head, weight, color, size, group}];
// gutter: {heads, state(row, head), names} of the null column; sums: text per row or null; said(row): a row in words;
// names: {title, keys, rows}; hover(spot), pick(row).
export function drawBipartite(picture) {
  const layout = layOut(picture);
  const element = svg("svg", {
    class: "bipartite",
    width: layout.width,
    height: layout.height,
    viewBox: `0 0 ${layout.width} ${layout.height}`,
    role: "img",
    "aria-label": `${picture.names.title}: ${picture.edges.length} edges from ${picture.names.keys} to ${picture.names.rows}. The button Table shows them as text.`,
    "data-edges": picture.edges.length,
  });
  const curves = drawEdges(picture, layout);
  const labels = { keys: drawKeys(picture, layout), rows: drawRows(picture, layout) };
  element.append(
    headings(picture, layout),
    ...zones(picture, layout),
    svg(
      "g",
      { class: "edges" },
      curves.map(({ curve }) => curve),
    ),
    svg("g", { class: "keys" }, Array.from(labels.keys.values())),
    svg("g", { class: "rows" }, labels.rows),
  );
  element.append(drawGutter(picture, layout));
  listen(element, picture);
  return { element, highlight: (spot) => highlight(element, curves, labels, spot) };
}

function layOut({ keys, rows, window, width, gutter, sums }) {
  const shown = keys.slice(window.first, window.first + window.count);
  const before = window.first > 0 ? ZONE : 0;
  const after = window.first + window.count < keys.length ? ZONE : 0;
  const tallest = Math.max(shown.length, rows.length, 1) * LINE;
  const spread = (length) => Math.min(LINE * 1.6, tallest / Math.max(1, length));
  const column = Math.min(190, Math.max(58, width * (width < NARROW ? 0.21 : 0.24)));
  const sumWidth = sums ? 52 : 0;
  const least = width - 2 * column - sumWidth - 60; // of which the edges leave so much to the null column
  const fitting = Math.min(CELL, least / Math.max(1, gutter.heads.length));
  const counted = fitting < SMALLEST_CELL;
  const cell = counted ? 36 : fitting;
  const gutterWidth = Math.max(30, (counted ? 1 : gutter.heads.length) * cell) + 12;
  const right = width - gutterWidth - sumWidth - column;
  const rowGap = spread(rows.length);
  const keyGap = spread(shown.length);
  return {
    width,
    column,
    cell,
    counted,
    left: column,
    right,
    before,
    after,
    rowGap,
    keyGap,
    tallest,
    bottom: TOP + before + tallest + 14,
    height: TOP + before + Math.max(after, rows.length > TALL ? 22 : 0) + tallest + 8,
    gutterAt: right + column + 6,
    sumAt: width - 4,
    rowY: (row) => TOP + before + rowGap * (row + 0.5),
    keyY(key) {
      const offset = key - window.first;
      if (offset < 0) return TOP + 22 + (ZONE - 30) * (key / window.first);
      if (offset < shown.length) return TOP + before + keyGap * (offset + 0.5);
      return (
        TOP +
        before +
        tallest +
        8 +
        (ZONE - 30) * ((offset - shown.length) / Math.max(1, keys.length - window.first - shown.length))
      );
    },
  };
}

function headings({ rows, names, gutter, sums }, { width, left, right, cell, counted, gutterAt, sumAt, bottom }) {
  const heading = (x, text, anchor, y = 14) => svg("text", { class: "heading", x, y, "text-anchor": anchor }, text);
  const side = (name) => (width < NARROW ? name.replace(/ \(.*/, "") : name);
  const parts = [heading(left, side(names.keys), "end"), heading(right, side(names.rows), "start")];
  const columns = counted ? 1 : gutter.heads.length;
  parts.push(heading(gutterAt + (columns * cell) / 2, "null", "middle"));
  if (counted) parts.push(heading(gutterAt + cell / 2, "heads", "middle", 32));
  const every = Math.ceil(14 / cell);
  if (!counted)
    gutter.heads.forEach((head, i) => {
      const name = gutter.names?.[i] ?? ordinal(head);
      for (const y of rows.length > TALL ? [32, bottom] : [32]) // where the first are out of sight, too
        if (i % every === 0) parts.push(heading(gutterAt + (i + 0.5) * cell, name, "middle", y));
    });
  if (sums) parts.push(heading(sumAt, width < NARROW ? "sum" : "row sum", "end"));
  return svg("g", {}, parts);
}

function zones({ keys, window }, { before, after, left, tallest }) {
  const earlier = window.first;
  const later = keys.length - window.first - window.count;
  const zone = (y, text, textY) =>
    svg(
      "g",
      { class: "zone" },
      svg("rect", { x: left + 3, y, width: 6, height: ZONE - 26, rx: 3 }),
      svg("text", { x: left - 6, y: textY, "text-anchor": "end" }, text),
    );
  return [
    before ? zone(TOP + 18, `${earlier.toLocaleString("en")} earlier`, TOP + 48) : null,
    after ? zone(TOP + before + tallest + 6, `${later.toLocaleString("en")} later`, TOP + before + tallest + 40) : null,
  ].filter(Boolean);
}

function drawEdges({ edges }, { left, right, keyY, rowY }) {
  const [from, to] = [left + 10, right - 8];
  const middle = (from + to) / 2;
  const order = [...edges].sort((a, b) => Math.abs(a.weight) - Math.abs(b.weight));
  return order.map((edge) => {
    const [y1, y2] = [keyY(edge.key).toFixed(1), rowY(edge.row).toFixed(1)];
    const curve = svg("path", {
      class: `edge ${edge.group ?? ""} ${edge.weight < 0 ? "negative" : ""}`,
      d: `M${from} ${y1}C${middle} ${y1} ${middle} ${y2} ${to} ${y2}`,
      stroke: edge.color,
      "stroke-width": edge.size.toFixed(2),
      "data-row": edge.row,
      "data-key": edge.key,
      "data-head": edge.head,
      "data-weight": edge.weight,
    });
    return { edge, curve };
  });
}

function label(unit, x, y, anchor, space) {
  const text = svg(
    "text",
    { x, y: y + 5, "text-anchor": anchor, class: unit.special ? "special" : "token" },
    fit(unit.label, space),
  );
  if (isRightToLeft(unit.label)) {
    text.setAttribute("direction", "rtl"); // the anchor is then that of the other end
    text.setAttribute("text-anchor", anchor === "end" ? "start" : "end");
  }
  return text;
}

function drawKeys({ keys, window }, { left, column, keyY, keyGap }) {
  const shown = new Map();
  for (let key = window.first; key < Math.min(keys.length, window.first + window.count); key += 1) {
    const y = keyY(key);
    shown.set(
      key,
      svg(
        "g",
        { class: "unit", "data-key": key },
        svg("title", {}, visible(keys[key].label.slice(0, 300))),
        svg("rect", { x: 0, y: y - keyGap / 2, width: left + 4, height: keyGap, rx: 5 }),
        label(keys[key], left, y, "end", column - 14),
      ),
    );
  }
  return shown;
}

function drawRows({ rows, sums, said }, { right, column, rowY, rowGap, sumAt, width }) {
  return rows.map((unit, row) => {
    const y = rowY(row);
    const parts = [
      svg("title", {}, visible(unit.label.slice(0, 300))),
      svg("rect", { x: right - 4, y: y - rowGap / 2, width: width - right + 4, height: rowGap, rx: 5 }),
      label(unit, right + 2, y, "start", column - 14),
    ];
    if (sums) parts.push(svg("text", { class: "sum", x: sumAt, y: y + 5, "text-anchor": "end" }, number(sums[row])));
    return svg("g", { class: "unit", "data-row": row, "data-said": said?.(row) }, parts);
  });
}

// The null column: a mark per row and head or, where heads are too many for the width, their number.
function drawGutter({ rows, gutter }, { gutterAt, rowY, cell, counted }) {
  if (counted)
    return svg(
      "g",
      { class: "gutter" },
      rows.map((_, row) => {
        const nulls = gutter.heads.filter((head) => gutter.state(row, head) === "null").length;
        const props = { class: nulls ? "null-word" : "sum", x: gutterAt + cell / 2, y: rowY(row) + 4 };
        return svg("text", { ...props, "text-anchor": "middle", "data-nulls": nulls }, String(nulls));
      }),
    );
  const half = Math.min(4.5, cell / 2 - 0.8);
  const marks = rows.map((_, row) =>
    gutter.heads.map((head, i) => {
      const [x, y] = [gutterAt + (i + 0.5) * cell, rowY(row)];
      const state = gutter.state(row, head);
      if (state === "active") return svg("circle", { class: "active-mark", cx: x, cy: y, r: Math.min(1.6, half) });
      if (state !== "null") return null;
      return svg("path", {
        class: "null-mark",
        d: `M${x - half} ${y - half}h${2 * half}v${2 * half}h${-2 * half}zM${x - half} ${y + half}l${2 * half} ${-2 * half}`,
        "data-null": "",
        "data-row": row,
        "data-head": head,
      });
    }),
  );
  return svg("g", { class: "gutter" }, marks);
}

function listen(element, { hover, pick }) {
  const spotOf = (target) => {
    const found = target.closest?.("[data-row],[data-key]");
    if (!found) return null;
    const { row, key, head, weight } = found.dataset;
    return {
      row: row === undefined ? undefined : Number(row),
      key: key === undefined ? undefined : Number(key),
      head: head === undefined ? undefined : Number(head),
      weight: weight === undefined ? undefined : Number(weight),
    };
  };
  element.addEventListener("pointerover", (event) => hover?.(spotOf(event.target)));
  element.addEventListener("pointerleave", () => hover?.(null));
  element.addEventListener("click", (event) => {
    const spot = spotOf(event.target);
    if (spot?.row !== undefined) pick?.(spot.row);
  });
}

// Bring out what belongs to a spot {row, key} and let the rest fade.
function highlight(element, curves, labels, spot) {
  element.classList.toggle("focused", Boolean(spot));
  const lit = { keys: new Set(), rows: new Set() };
  for (const { edge, curve } of curves) {
    const on =
      Boolean(spot) &&
      (spot.row === undefined || spot.row === edge.row) &&
      (spot.key === undefined || spot.key === edge.key);
    curve.classList.toggle("lit", on);
    if (on) {
      lit.keys.add(edge.key);
      lit.rows.add(edge.row);
    }
  }
  for (const [key, group] of labels.keys) group.classList.toggle("lit", lit.keys.has(key) || spot?.key === key);
  labels.rows.forEach((group, row) => group.classList.toggle("lit", lit.rows.has(row) || spot?.row === row));
}
