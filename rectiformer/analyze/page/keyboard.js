// Keys: every view can be used without a pointer.

import { el } from "./dom.js";
import { WINDOW } from "./scene.js";
import { resolve } from "./selection.js";
import { viewsOf } from "./views.js";

const HELP = [
  ["\u2191 \u2193", "row before, after"],
  ["\u2190 \u2192", "head before, after (alone)"],
  ["[ ]", "layer before, after"],
  ["Page \u2191 \u2193", "window of rows in a long text"],
  ["n p", "example after, before"],
  ["k", "attention: cross, encoder, decoder"],
  ["w", "words or pieces"],
  ["c", "color by weight or head"],
  ["e", "all edges, or as many as are readable"],
  ["a", "all heads"],
  ["1 \u2026 5", "views"],
  ["t", "light or dark"],
  ["Tab", "through all switches; arrows move within a group"],
  ["?", "this help"],
  ["Esc", "close it"],
];

// The list of keys as a dialog.
export function helpDialog(context) {
  const toggle = el("input", {
    type: "checkbox",
    checked: true,
    on: {
      change: () => {
        context.shortcuts = toggle.checked;
      },
    },
  });
  const dialog = el(
    "dialog",
    { class: "help", "aria-label": "Keys" },
    el("h2", {}, "Keys"),
    el(
      "dl",
      {},
      HELP.map(([keys, text]) => [el("dt", {}, keys), el("dd", {}, text)]),
    ),
    el("p", {}, el("label", {}, toggle, " use letters and digits as keys")),
    el("form", { method: "dialog" }, el("button", { class: "primary" }, "Close")),
  );
  return dialog;
}

// Listen for keys on the whole page, except where one types.
export function listenToKeys(context, dialog, switchTheme) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog"))
      return;
    if (scrolls(event, context) || (event.key.length === 1 && !context.shortcuts)) return;
    const act = actions(context, dialog, switchTheme)[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}

// Whether a key should move the page or what is scrolled in it, as it does elsewhere.
function scrolls({ key, target }, { shown }) {
  if (key.startsWith("Page")) return !(shown?.rows > shown?.inWindow);
  return key.startsWith("Arrow") && (!shown?.arrows || Boolean(target.closest(".table, .details")));
}

function actions(context, dialog, switchTheme) {
  const { store } = context;
  const state = store.get();
  const views = viewsOf(context).map(({ value }, i) => [String(i + 1), () => store.set({ view: value })]);
  const row = (by) => () => moveRow(context, by);
  const example = (by) => () => {
    const next = Math.max(0, Math.min((context.books[0]?.examples.length ?? 1) - 1, state.example + by));
    store.set({ example: next, row: 0, first: 0, keyFirst: null });
  };
  return {
    ...Object.fromEntries(views),
    "?": () => (dialog.open ? dialog.close() : dialog.showModal()),
    t: switchTheme,
    ArrowDown: row(1),
    ArrowUp: row(-1),
    PageDown: row(WINDOW),
    PageUp: row(-WINDOW),
    ArrowRight: () => moveHead(context, 1),
    ArrowLeft: () => moveHead(context, -1),
    "]": () => moveLayer(context, 1),
    "[": () => moveLayer(context, -1),
    n: example(1),
    p: example(-1),
    k: () => nextKind(context),
    w: () => store.set({ unit: state.unit === "word" ? "piece" : "word", row: 0, first: 0, keyFirst: null }),
    c: () => store.set({ color: state.color === "weight" ? "head" : "weight" }),
    e: () => store.set({ edges: state.edges === "all" ? "auto" : "all", threshold: 0 }),
    a: () => allHeads(context),
  };
}

function moveRow(context, by) {
  const { store, shown } = context;
  const { row, first } = store.get();
  const next = Math.max(0, Math.min((shown?.rows ?? 1) - 1, row + by));
  const outside = (shown?.rows ?? 0) > (shown?.inWindow ?? Infinity) && (next < first || next >= first + WINDOW);
  context.moved = true;
  store.set(
    outside ? { row: next, first: Math.max(0, next - (by > 0 ? 0 : WINDOW - 1)), keyFirst: null } : { row: next },
  );
}

function moveHead(context, by) {
  const { site, heads, layer } = resolve(context);
  if (!site) return;
  const from = heads.length === 1 ? heads[0] : by > 0 ? -1 : 0;
  context.store.set({ heads: [(from + by + site.heads) % site.heads], layer });
}

function allHeads(context) {
  const { site, layer } = resolve(context);
  if (site) context.store.set({ heads: Array.from({ length: site.heads }, (_, head) => head), layer });
}

function moveLayer(context, by) {
  const { example, kind, layer, heads } = resolve(context);
  const layers = example?.layers(kind) ?? [];
  const next = layers[Math.max(0, Math.min(layers.length - 1, layers.indexOf(layer) + by))];
  if (next !== undefined) context.store.set({ layer: next, heads, keyFirst: null });
}

function nextKind(context) {
  const { example, kind } = resolve(context);
  const sites = example?.siteKinds() ?? [];
  if (sites.length)
    context.store.set({
      kind: sites[(sites.indexOf(kind) + 1) % sites.length],
      layer: null,
      heads: null,
      first: 0,
      row: 0,
      keyFirst: null,
    });
}
