// What colors and marks mean, with the range of the scale in raw weights.

import { weightColor } from "./colors.js";
import { el, svg } from "./dom.js";
import { number } from "./text.js";

const WIDTH = 150;
const STEPS = 30;

// A scale from 0 (not drawn) to the largest weight, or from the most negative where there are such.
export function scaleLegend({ site, most, byRow }, unit) {
  const low = site.hasNegative() ? -most : 0;
  const end = (value) => (byRow && value ? `${value < 0 ? "-" : ""}the row's largest` : number(value));
  const steps = Array.from({ length: STEPS }, (_, i) => {
    const weight = low + ((most - low) * (i + 0.5)) / STEPS;
    return svg("rect", {
      x: (i * WIDTH) / STEPS,
      width: WIDTH / STEPS + 0.5,
      height: 8,
      fill: weightColor(weight, most),
    });
  });
  return el(
    "div",
    { class: "legend", "data-low": low, "data-high": most },
    el(
      "span",
      { class: "scale" },
      el("span", {}, end(low)),
      svg("svg", { width: WIDTH, height: 8, "aria-hidden": "true" }, steps),
      el("span", {}, end(most)),
    ),
    el(
      "span",
      { class: "note" },
      byRow
        ? `weights of ${unit}s, each row up to the largest that any head of this layer has in it; exact zeros are not drawn`
        : `raw weights of ${unit}s, up to the largest of all heads of this layer here; exact zeros are not drawn`,
    ),
  );
}

// The marks of the gutter.
export function gutterLegend() {
  return el(
    "div",
    { class: "legend" },
    mark(svg("path", { class: "null-mark", d: "M2 2h9v9h-9zM2 11l9 -9" })),
    el("span", {}, "null: sees keys, weighs none"),
    mark(svg("circle", { class: "active-mark", cx: 6.5, cy: 6.5, r: 1.8 })),
    el("span", {}, "active"),
  );
}

function mark(shape) {
  return svg("svg", { width: 13, height: 13, "aria-hidden": "true" }, shape);
}
