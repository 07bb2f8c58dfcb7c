// A drawing in its frame: title, what it shows, the same as a table, and as a file.

import { el } from "./dom.js";
import { download, fromCanvas, standalone } from "./svg.js";
import { brief, plural } from "./text.js";

const MOST_ROWS = 2000;
export const FRAME = 40; // pixels of a figure around what it frames
export const NARROWEST = 250; // of a drawing

// body: an element with an <svg> or <canvas> in it; table: () => {columns, rows}; note: text or element on top;
// level: of its heading.
export function figure({ title, note, body, table, name, wide, level = 2 }) {
  const frame = el("div", { class: "frame" }, body);
  let shown = null;
  const toggle = el(
    "button",
    { type: "button", class: "quiet", "data-action": "table", "aria-label": `${title} as a table`, "aria-pressed": "false", on: { click: flip } },
    "Table",
  );
  function flip() {
    shown = shown ? null : tableOf({ label: `${title}, table`, ...table() });
    frame.replaceChildren(shown ?? body);
    frame.classList.toggle("as-table", Boolean(shown));
    toggle.setAttribute("aria-pressed", String(Boolean(shown)));
  }
  const save = el(
    "button",
    { type: "button", class: "quiet", "data-action": "svg", "aria-label": `Save ${title} as SVG`, on: { click: () => saveAs(body, name ?? title) } },
    "SVG",
  );
  return el(
    "section",
    { class: wide ? "figure wide" : "figure", "aria-label": title, "data-figure": name ?? title },
    el("div", { class: "figure-head" }, el(`h${level}`, { class: "figure-title" }, title), el("div", { class: "tools" }, toggle, save)),
    note ? el("p", { class: "note" }, note) : null,
    frame,
  );
}

function saveAs(body, name) {
  const drawing = body.matches("svg") ? body : body.querySelector("svg");
  const canvas = body.matches("canvas") ? body : body.querySelector("canvas");
  download(drawing ? standalone(drawing) : fromCanvas(canvas), `rectiformer-${name}`);
}

// A table of the numbers behind a drawing; `numbers` are columns whose texts are numbers.
export function tableOf({ columns, rows, total = rows.length, numbers = [], label = "Numbers" }) {
  const aligned = (value, column) => (typeof value === "number" || numbers.includes(columns[column]) ? "number" : "");
  const cell = (value, column) =>
    el(
      "td",
      { class: aligned(value, column), dir: "auto" },
      typeof value === "number" ? exact(value) : brief(String(value), 120),
    );
  const shown = rows.slice(0, MOST_ROWS);
  return el(
    "div",
    { class: "table", tabindex: "0", role: "region", "aria-label": label },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          columns.map((column) => el("th", { scope: "col", class: numbers.includes(column) ? "number" : "" }, column)),
        ),
      ),
      el(
        "tbody",
        {},
        shown.map((row) => el("tr", {}, row.map(cell))),
      ),
    ),
    shown.length < total
      ? el("p", { class: "note" }, `The first ${plural(shown.length, "row")} of ${total.toLocaleString("en")}.`)
      : null,
  );
}

function exact(value) {
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(6)));
}
