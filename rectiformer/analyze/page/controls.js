// The switches above a picture: kind, layer, heads, units, threshold.

import { headColor } from "./colors.js";
import { el, picker, segmented } from "./dom.js";
import { SITE_NAMES } from "./model.js";
import { EDGE_RULES, FILTERS, SCALES } from "./scene.js";
import { count, ordinal, percent, plural } from "./text.js";

export function kindControl({ example, kind }, store) {
  const options = example.siteKinds().map((value) => ({ value, text: SITE_NAMES[value] }));
  return segmented("Attention", options, kind, (value) =>
    store.set({ kind: value, layer: null, heads: null, first: 0, row: 0, keyFirst: null }),
  );
}

export function layerControl({ example, kind, layer }, choose) {
  const options = example.layers(kind).map((value) => ({ value, text: String(ordinal(value)) }));
  return segmented("Layer", options, layer, choose);
}

export function modelControl({ books, store }) {
  if (books.length < 2) return null;
  const options = books.map((book, value) => ({ value, text: `${"AB"[value]} \u00b7 ${book.name}` }));
  return segmented("Model", options, store.get().model, (value) =>
    store.set({ model: value, layer: null, heads: null, otherLayer: null, otherHeads: null }),
  );
}

// One switch per head, with the share of queries it is active for; `choose` is told the new list.
// Shift-click leaves only that head on. `off` adds a switch of the live page that takes the head out of the model.
export function headControl({ site, heads }, choose, { label = "Heads", colored = false, off = null } = {}) {
  const all = Array.from({ length: site.heads }, (_, head) => head);
  const chips = all.map((head) => {
    const { nulls, queries, edges } = site.counts(head);
    const active = queries ? 1 - nulls / queries : 0;
    const level = el("span", { class: "level" });
    level.style.height = `${Math.round(100 * active)}%`;
    if (colored) level.style.background = headColor(head);
    const toggle = (event) =>
      choose(event.shiftKey ? [head] : all.filter((each) => heads.includes(each) !== (each === head)));
    return el(
      "span",
      { class: "chip-pair" },
      el(
        "button",
        {
          type: "button",
          class: "chip",
          "data-value": head,
          "data-head-switch": head,
          "aria-pressed": String(heads.includes(head)),
          "data-edges": edges,
          title: `active for ${percent(active)} of queries, ${plural(edges, "edge")}. Shift-click: this head only.`,
          on: { click: toggle },
        },
        el("span", { class: "meter" }, level),
        String(ordinal(head)),
      ),
      off?.(head),
    );
  });
  const quick = [
    ["all", all],
    ["none", []],
  ].map(([text, list]) =>
    el("button", { type: "button", class: "quiet", "data-value": text, on: { click: () => choose(list) } }, text),
  );
  return el(
    "div",
    { class: "control heads" },
    el("span", { class: "label" }, label),
    el("div", { class: "chips", role: "group", "aria-label": label }, chips, quick),
  );
}

export function unitControl(store) {
  const options = [
    { value: "word", text: "words" },
    { value: "piece", text: "pieces" },
  ];
  return segmented("Show", options, store.get().unit, (unit) => store.set({ unit, row: 0, first: 0, keyFirst: null }));
}

export function colorControl(store) {
  const options = [
    { value: "weight", text: "weight" },
    { value: "head", text: "head" },
  ];
  return segmented("Color by", options, store.get().color, (color) => store.set({ color }));
}

export function scaleControl(store) {
  return segmented("Scale", SCALES, store.get().scale, (scale) => store.set({ scale }));
}

export function filterControl(store) {
  return picker("Rows", FILTERS, store.get().filter, (filter) => store.set({ filter, first: 0, row: 0 }));
}

export function edgeControl(store) {
  return segmented("Edges per row", EDGE_RULES, store.get().edges, (edges) => store.set({ edges }));
}

// How many of the edges are drawn and by which rule, with a way to see them all.
export function edgeCount(store, { total, hidden, why }, noun = "edge") {
  if (!hidden) return el("span", { class: "shown" }, `${total === 1 ? "the" : "all"} ${plural(total, noun)} shown`);
  const all = () => store.set({ edges: "all", threshold: 0 });
  const some = store.get().edges !== "all" || store.get().threshold > 0;
  return el(
    "span",
    { class: "shown" },
    el("b", {}, `${count(total - hidden)} of ${plural(total, noun)} shown`),
    `: ${why} `,
    some && el("button", { type: "button", class: "inline", "data-value": "all-edges", on: { click: all } }, "Show all"),
  );
}

// The share of the scale's end below which edges are hidden: finer near zero, where most weights are.
export function thresholdOf(state) {
  return state.threshold ** 2;
}

// `describe` says a threshold in words.
export function thresholdControl(store, describe) {
  const value = store.get().threshold;
  const shown = el("output", { class: "threshold-value" }, describe(store.get()));
  const slider = el("input", {
    type: "range",
    min: 0,
    max: 1,
    step: 0.01,
    value,
    "aria-label": "Hide weights below",
    on: {
      input: () => {
        store.set({ threshold: Number(slider.value) });
        shown.textContent = describe(store.get());
      },
    },
  });
  return el("div", { class: "control threshold" }, el("span", { class: "label" }, "Hide below"), slider, shown);
}
