// Colors of weights and of heads, for both themes. Zero has no color: what is not there is not drawn.

const WEIGHTS = {
  light: ["#bcd7e8", "#6aaed6", "#2b7bba", "#0b3c78"],
  dark: ["#29475c", "#2f79a8", "#58b4e0", "#d6f1ff"],
};
const NEGATIVE = {
  light: ["#f3d3bd", "#e59560", "#c4581b", "#7a2e05"],
  dark: ["#553524", "#a8602f", "#e89a62", "#ffe6d3"],
};
const HEADS = {
  light: ["#0072b2", "#c4581b", "#008765", "#a0418a", "#8a6d00", "#3d5a80", "#b3243f", "#4f7a28"],
  dark: ["#5ab4e6", "#f0955a", "#4cc9a4", "#d98cc4", "#d9bb3d", "#9db7de", "#f07d90", "#a3cf74"],
};

export function theme() {
  return document.documentElement.dataset.theme === "dark" ? "dark" : "light";
}

// The color of a weight where `most` is the largest: [0, most] evenly over the ramp.
export function weightColor(weight, most) {
  const ramp = (weight < 0 ? NEGATIVE : WEIGHTS)[theme()];
  return mix(ramp, most > 0 ? Math.min(1, Math.abs(weight) / most) : 0);
}

export function headColor(head) {
  const colors = HEADS[theme()];
  return colors[head % colors.length];
}

function mix(ramp, share) {
  const position = share * (ramp.length - 1);
  const index = Math.min(ramp.length - 2, Math.floor(position));
  const [from, to] = [channels(ramp[index]), channels(ramp[index + 1])];
  return `rgb(${from.map((value, i) => Math.round(value + (to[i] - value) * (position - index))).join(", ")})`;
}

function channels(hex) {
  return [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16));
}

// 256 colors as [r, g, b], for canvases.
export function lookup(negative = false) {
  const ramp = (negative ? NEGATIVE : WEIGHTS)[theme()];
  return Array.from({ length: 256 }, (_, i) =>
    mix(ramp, i / 255)
      .match(/\d+/g)
      .map(Number),
  );
}
