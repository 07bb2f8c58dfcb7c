// The whole matrix at a glance on a canvas: each dot the largest weight it covers, zeros blank, null rows in a strip.

import { lookup } from "./colors.js";
import { el } from "./dom.js";

const SIDE = 276;
const STRIP = 10; // dots for the share of null rows

// A map of the chosen heads of a loaded site; `move(query, key)` is told where the reader points.
export function drawMinimap({ site, heads, box, move }) {
  const rows = Math.min(site.queries, SIDE);
  const columns = Math.min(site.keys, SIDE - STRIP - 4);
  const canvas = el("canvas", {
    width: columns,
    height: rows,
    "data-rows": rows,
    "data-columns": columns,
    role: "img",
    "aria-label": "Map of all weights",
  });
  const strip = el("canvas", { width: 1, height: rows, class: "strip", title: "share of null rows" });
  const drawn = paint(canvas, pool(site, heads, rows, columns));
  paintNulls(strip, site, heads, rows);
  const scale = Math.min(20, SIDE / rows, (SIDE - STRIP - 4) / columns);
  size(canvas, columns * scale, rows * scale);
  size(strip, STRIP, rows * scale);
  canvas.dataset.dots = drawn;
  const frame = el("div", { class: "window-frame" });
  const stack = el("div", { class: "minimap" }, canvas, frame, strip);
  position(frame, box, site, columns * scale, rows * scale);
  if (move) follow(canvas, site, move);
  return stack;
}

// Whether a dot covers several weights.
export function isPooled(site) {
  return site.queries > SIDE || site.keys > SIDE - STRIP - 4;
}

function size(canvas, width, height) {
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
}

function pool(site, heads, rows, columns) {
  const dots = new Float32Array(rows * columns);
  for (const head of heads) {
    for (let query = 0; query < site.queries; query += 1) {
      const line = Math.floor((query * rows) / site.queries) * columns;
      const row = site.rowOf(head, query);
      for (let at = site.rowStarts[row]; at < site.rowStarts[row + 1]; at += 1) {
        const dot = line + Math.floor((site.columns[at] * columns) / site.keys);
        if (Math.abs(site.weights[at]) > Math.abs(dots[dot])) dots[dot] = site.weights[at];
      }
    }
  }
  return { dots, most: site.largest() };
}

function paint(canvas, { dots, most }) {
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const [positive, negative] = [lookup(), lookup(true)];
  let drawn = 0;
  dots.forEach((weight, dot) => {
    if (weight === 0) return;
    const color = (weight < 0 ? negative : positive)[Math.round(255 * Math.min(1, Math.abs(weight) / most))];
    image.data.set([...color, 255], dot * 4);
    drawn += 1;
  });
  context.putImageData(image, 0, 0);
  return drawn;
}

function paintNulls(strip, site, heads, rows) {
  const nulls = new Float32Array(rows);
  for (const head of heads) {
    for (let query = 0; query < site.queries; query += 1) {
      nulls[Math.floor((query * rows) / site.queries)] += site.nulls[site.rowOf(head, query)];
    }
  }
  const context = strip.getContext("2d");
  const each = (heads.length * site.queries) / rows;
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--null");
  nulls.forEach((sum, row) => {
    context.globalAlpha = Math.min(1, sum / Math.max(1, each));
    if (sum > 0) context.fillRect(0, row, 1, 1);
  });
}

function position(frame, box, site, width, height) {
  frame.hidden = !box;
  if (!box) return;
  const [top, bottom] = [box.firstQuery / site.queries, box.lastQuery / site.queries];
  const [left, right] = [box.firstKey / site.keys, box.lastKey / site.keys];
  Object.assign(frame.style, {
    top: `${top * height}px`,
    height: `${Math.max(8, (bottom - top) * height)}px`,
    left: `${left * width}px`,
    width: `${Math.max(8, (right - left) * width)}px`,
  });
}

function follow(canvas, site, move) {
  canvas.classList.add("movable");
  canvas.addEventListener("click", (event) => {
    const { left, top, width, height } = canvas.getBoundingClientRect();
    move(
      Math.floor(((event.clientY - top) / height) * site.queries),
      Math.floor(((event.clientX - left) / width) * site.keys),
    );
  });
}
