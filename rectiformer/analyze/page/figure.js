// A drawing in its frame: title, what it shows, the same as a table, and as a file.

import { el } from "./dom.js";
import { download, fromCanvas, standalone } from "./svg.js";
import { brief, plural } from "./text.js";

const MOST_ROWS = 2000;

// body: an element with an <svg> or <canvas> in it; table: () => {columns, rows}; note: text or element on top.
export function figure({ title, note, body, table, name, wide }) {
  const frame = el("div", { class: "frame" }, body);
  let shown = null;
  const toggle = el(
    "button",
    { type: "button", class: "quiet", "data-action": "table", "aria-pressed": "false", on: { click: flip } },
    "Table",
  );
  function flip() {
    shown = shown ? null : tableOf(table());
    frame.replaceChildren(shown ?? body);
    toggle.setAttribute("aria-pressed", String(Boolean(shown)));
  }
  const save = el(
    "button",
    { type: "button", class: "quiet", "data-action": "svg", on: { click: () => saveAs(body, name ?? title) } },
    "SVG",
  );
  return el(
    "section",
    { class: wide ? "figure wide" : "figure", "aria-label": title, "data-figure": name ?? title },
    el("div", { class: "figure-head" }, el("h3", {}, title), el("div", { class: "tools" }, toggle, save)),
    note ? el("p", { class: "note" }, note) : null,
    frame,
  );
}

function saveAs(body, name) {
  const drawing = body.matches("svg") ? body : body.querySelector("svg");
  const canvas = body.matches("canvas") ? body : body.querySelector("canvas");
  download(drawing ? standalone(drawing) : fromCanvas(canvas), `rectiformer-${name}`);
}

// A table of the numbers behind a drawing.
export function tableOf({ columns, rows, total = rows.length }) {
  const cell = (value) =>
    el(
      "td",
      { class: typeof value === "number" ? "number" : "", dir: "auto" },
      typeof value === "number" ? exact(value) : brief(String(value), 120),
    );
  const shown = rows.slice(0, MOST_ROWS);
  return el(
    "div",
    { class: "table", tabindex: "0" },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          columns.map((column) => el("th", { scope: "col" }, column)),
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
