// Line charts with a mark for each series, so that none is told by color alone.

import { headColor } from "./colors.js";
import { el, svg } from "./dom.js";
import { figure } from "./figure.js";
import { number, widthOf } from "./text.js";

const WIDTH = 352;
const HEIGHT = 218;
const BOX = { left: 50, right: 12, top: 10, bottom: 40 };
const MOST_STEPS = 6;
const DASHES = ["", "6 4", "2 3", "9 3 2 3"];
const MARKS = [
  (x, y) => `M${x - 4} ${y}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0`,
  (x, y) => `M${x} ${y - 5}l5 9h-10z`,
  (x, y) => `M${x - 4} ${y - 4}h8v8h-8z`,
  (x, y) => `M${x} ${y - 5}l5 5l-5 5l-5 -5z`,
];

// series: [{name, values, heads}]; values: one number (or null) per category; heads: lists of numbers drawn as faint dots.
export function chart({ title, note, name, categories, axis, series, high = null }) {
  const shown = series.filter((each) => each.values.some(Number.isFinite));
  if (!shown.length) return null;
  const numbers = shown.flatMap((each) => [...each.values, ...(each.heads ?? []).flat()]).filter(Number.isFinite);
  const [bottom, top] = [Math.min(0, ...numbers), high ?? Math.max(0, ...numbers)];
  const scale = scaleOf(categories.length, ticksOf(bottom, top > bottom ? top : bottom + 1));
  const drawing = svg(
    "svg",
    {
      class: "chart",
      width: WIDTH,
      height: HEIGHT,
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      role: "img",
      "aria-label": title,
    },
    axes(scale, categories, axis),
    shown.map((each, i) => drawSeries(each, i, scale)),
  );
  return figure({
    title,
    note,
    level: 3,
    name: name ?? title,
    body: el("div", { class: "chart-body" }, drawing, shown.length > 1 || shown[0].name ? legendOf(shown) : null),
    table: () => ({
      columns: [axis, ...shown.map((each) => each.name || title)],
      rows: categories.map((category, i) => [String(category), ...shown.map((each) => each.values[i] ?? "\u2013")]),
    }),
  });
}

// Multiples of 1, 2 or 5 times a power of ten that hold both numbers, 0 among them where one is negative.
function ticksOf(low, high) {
  const least = (high - low) / MOST_STEPS;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= least * 0.999);
  const [first, last] = [Math.floor(low / step + 1e-3), Math.ceil(high / step - 1e-3)]; // 0.6 / 0.2 is not quite 3
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
}

function scaleOf(length, ticks) {
  const [width, height] = [WIDTH - BOX.left - BOX.right, HEIGHT - BOX.top - BOX.bottom];
  const [low, high] = [ticks[0], ticks.at(-1)];
  return {
    ticks,
    x: (i) => BOX.left + (width * (i + 0.5)) / length,
    y: (value) => BOX.top + height * (1 - (value - low) / (high - low)),
  };
}

function axes(scale, categories, axis) {
  const widest = Math.max(...categories.map((category) => widthOf(String(category)))) + 6;
  const every = Math.ceil((categories.length * widest) / (WIDTH - BOX.left - BOX.right));
  return svg(
    "g",
    { class: "axes" },
    scale.ticks.map((tick) => [
      svg("line", { x1: BOX.left, x2: WIDTH - BOX.right, y1: scale.y(tick), y2: scale.y(tick) }),
      svg("text", { x: BOX.left - 7, y: scale.y(tick) + 4, "text-anchor": "end" }, number(tick, 3)),
    ]),
    categories.map((category, i) =>
      i % every
        ? null
        : svg("text", { x: scale.x(i), y: HEIGHT - BOX.bottom + 18, "text-anchor": "middle" }, String(category)),
    ),
    svg(
      "text",
      { class: "axis-name", x: (BOX.left + WIDTH - BOX.right) / 2, y: HEIGHT - 5, "text-anchor": "middle" },
      axis,
    ),
  );
}

function drawSeries({ values, heads = [], name, look }, index, { x, y }) {
  const style = look ?? index;
  const color = headColor(style);
  const points = values.map((value, i) => (Number.isFinite(value) ? [x(i), y(value), value] : null)).filter(Boolean);
  const shift = index * 5 - 2;
  return svg(
    "g",
    { "data-series": name, "data-points": points.length },
    heads.map((list, i) =>
      list
        .filter(Number.isFinite)
        .map((value) => svg("circle", { class: "head-dot", cx: x(i) + 9 + shift, cy: y(value), r: 2.2, fill: color })),
    ),
    svg("path", {
      class: "line",
      d: points.map(([px, py], i) => `${i ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join(""),
      stroke: color,
      "stroke-dasharray": DASHES[style % 4] || null,
    }),
    points.map(([px, py, value]) =>
      svg(
        "path",
        { class: "point", d: MARKS[style % 4](px, py), fill: color, "data-value": value },
        svg("title", {}, `${name ? `${name}: ` : ""}${number(value, 4)}`),
      ),
    ),
  );
}

function legendOf(series) {
  return el(
    "div",
    { class: "legend" },
    series.map(({ name, look }, i) => {
      const style = look ?? i;
      const sample = svg(
        "svg",
        { width: 26, height: 12, "aria-hidden": "true" },
        svg("path", {
          class: "line",
          d: "M0 6h26",
          stroke: headColor(style),
          "stroke-dasharray": DASHES[style % 4] || null,
        }),
        svg("path", { d: MARKS[style % 4](13, 6), fill: headColor(style) }),
      );
      return el("span", { class: "series" }, sample, name);
    }),
  );
}
