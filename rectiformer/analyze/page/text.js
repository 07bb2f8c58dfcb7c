// Text as it can be shown: hostile characters made visible, long tokens shortened, direction known.

const BIDI = /[\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ufeff]/g;
const CONTROL = /[\u0000-\u001f\u007f-\u009f]/g;
const NOT_XML = /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]|[\ufffe\uffff]/g;
const RIGHT_TO_LEFT =
  /^[^A-Za-z\u00c0-\u058f\u0900-\u1fff\u3040-\u9fff\uac00-\ud7af]*[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/;

const LONGEST = 300;
const FONT = "14px system-ui, sans-serif";
const measuring = document.createElement("canvas").getContext("2d");

// Control characters as their pictures, marks of direction by their code points, what XML cannot hold as U+FFFD.
export function visible(text) {
  return text
    .replace(CONTROL, (c) => (c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : "\u2421"))
    .replace(BIDI, (c) => `\u2039U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}\u203a`)
    .replace(NOT_XML, "\ufffd");
}

// The words of a side. Their offsets count characters as Python does, not halves of them as JavaScript does.
export function wordTexts({ text, words }) {
  const characters = Array.from(text);
  return words.map(([, , start, stop]) => characters.slice(start, stop).join(""));
}

// At most some hundred characters of a text, with a note of what is missing.
export function brief(text, longest = LONGEST) {
  const shown = visible(text);
  return shown.length <= longest
    ? shown
    : `${shown.slice(0, longest)}\u2026 (${shown.length.toLocaleString("en")} characters)`;
}

// A layer or head as people count them, from 1; in records, findings and attributes they are indices, from 0.
export function ordinal(index) {
  return index + 1;
}

// Pixels that a text takes.
export function widthOf(text, font = FONT) {
  measuring.font = font;
  return measuring.measureText(visible(text.slice(0, LONGEST))).width;
}

// As much of a text as fits `width` pixels.
export function fit(text, width, font = FONT) {
  measuring.font = font;
  let shown = Array.from(visible(text.slice(0, LONGEST)));
  const whole = text.length <= LONGEST;
  if (whole && measuring.measureText(shown.join("")).width <= width) return shown.join("");
  while (shown.length > 1 && measuring.measureText(`${shown.join("")}\u2026`).width > width) {
    shown = shown.slice(0, Math.min(shown.length - 1, Math.ceil(shown.length * 0.9)));
  }
  return `${shown.join("")}\u2026`;
}

export function isRightToLeft(text) {
  return RIGHT_TO_LEFT.test(text.slice(0, LONGEST));
}

// A weight or a sum as it is, in few digits.
export function number(value, digits = 3) {
  if (value === 0 || !Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
}

export function percent(share) {
  if (!Number.isFinite(share)) return "\u2013";
  const text = (100 * share).toFixed(1);
  const rounded = text === "0.0" || text === "100.0";
  return rounded && share !== 0 && share !== 1 ? (share < 0.5 ? "<0.1%" : ">99.9%") : `${text}%`;
}

export function count(value) {
  return value.toLocaleString("en");
}

// "1 edge", "2 edges".
export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}
