// The page: reads its data, shows the view the state asks for, and keeps both in step.

import { attentionView } from "./attention.js";
import { compareView } from "./compare.js";
import { dashboardView } from "./dashboards.js";
import { el, segmented } from "./dom.js";
import { FRAME, NARROWEST } from "./figure.js";
import { goldView } from "./gold.js";
import { helpDialog, listenToKeys } from "./keyboard.js";
import { languageName, Live } from "./live.js";
import { mapView } from "./map.js";
import { Book } from "./model.js";
import { createStore, fromAddress, toAddress } from "./state.js";
import { brief, plural } from "./text.js";
import { viewsOf } from "./views.js";

const DRAW = { attention: attentionView, heads: mapView, gold: goldView, test: dashboardView, compare: compareView };
const CAUTION = "What a head weighs is what it could use, not proof of what it did: attention is no proof of cause.";
const byId = (id) => document.getElementById(id);

const data = JSON.parse(byId("page-data").textContent);
const store = createStore(fromAddress(location.hash));
const context = {
  store,
  books: [],
  findings: data.findings ?? [],
  summary: data.summary ?? null,
  live: null,
  shortcuts: true, // keys that are letters and digits
  unfolded: null,
  moved: false,
  shown: null,
  width: 0,
  full: 0,
  say: (text) => {
    byId("said").textContent = text;
  },
};
let turn = 0;

function start() {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  context.books = readRecords();
  if (data.live) {
    context.live = new Live(context, data);
    byId("live").append(context.live.form);
  }
  byId("live").hidden = !data.live;
  const dialog = helpDialog(context);
  document.body.append(dialog);
  byId("top").append(...heading(dialog));
  byId("foot").append(el("p", { class: "note" }, CAUTION), ...provenance());
  for (const note of data.left_out ?? [])
    byId("notices").append(el("p", { class: "note warn", "data-left-out": "" }, note));
  byId("notices").hidden = !byId("notices").children.length;
  listenToKeys(context, dialog, switchTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ({ matches }) =>
    setTheme(matches ? "dark" : "light"),
  );
  store.listen((state, patch) => {
    toAddress(state);
    if (!context.shown?.update?.(patch)) render();
  });
  let resizing = 0;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(render, 150);
  });
  render();
}

function readRecords() {
  try {
    return (data.records ?? []).map((record) => new Book(record));
  } catch (error) {
    byId("notices").append(el("p", { class: "error", role: "alert" }, brief(String(error.message))));
    return [];
  }
}

// Which models these are, as exactly as the records know.
function provenance() {
  return context.books.map(({ name, card }) =>
    el(
      "p",
      { class: "note" },
      brief([name, card.id && `id ${card.id.slice(0, 16)}`, card.written_by].filter(Boolean).join(" \u00b7 ")),
    ),
  );
}

function heading(dialog) {
  const models = data.live
    ? (data.models ?? []).map((name) => [name, ""])
    : context.books.map((book) => [book.name, variants(book.card)]);
  const names = models.map(([name, note], i) =>
    el(
      "span",
      { class: "model" },
      `${models.length > 1 ? `${"AB"[i]} \u00b7 ` : ""}${brief(name, 80)}`,
      el("span", { class: "note" }, ` ${brief(note, 80)}`),
    ),
  );
  const skip = () => byId("view").focus();
  return [
    el("button", { type: "button", class: "skip", on: { click: skip } }, "Skip to the view"),
    el(
      "div",
      { class: "title" },
      el("h1", {}, el("bdi", {}, brief(data.title || "rectiformer", 200))),
      el("div", { class: "models" }, names, languagesOf(data.languages)),
    ),
    el("div", { id: "tabs" }),
    el(
      "div",
      { class: "tools" },
      el("button", { type: "button", class: "quiet", id: "theme", on: { click: switchTheme } }, "Light / dark"),
      el("button", { type: "button", class: "quiet", id: "help", on: { click: () => dialog.showModal() } }, "Keys ?"),
    ),
  ];
}

// "German → English", as far as it is known.
function languagesOf(codes = []) {
  const known = codes.map(languageName);
  if (!known.some(Boolean)) return null;
  return el("span", { class: "note", id: "languages" }, known.map((name) => name || "?").join(" \u2192 "));
}

// The variants of a model, where its name does not already say them.
function variants({ variants: each, name }) {
  const used = Object.entries(each).filter(([, variant]) => variant);
  const distinct = new Set(used.map(([, variant]) => variant));
  if (distinct.size > 1) return used.map((pair) => pair.join(" ")).join(", ");
  return distinct.has(name) ? "" : Array.from(distinct).join("");
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  render();
}

function switchTheme() {
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
}

function listExamples(state) {
  const examples = context.books[0]?.examples ?? [];
  byId("examples").hidden = examples.length < 2 || state.view === "test"; // which is about all of them
  const shown = `${state.example} of ${examples.length}`;
  if (byId("examples").dataset.shown === shown) return;
  byId("examples").dataset.shown = shown;
  const list = examples.map((example, i) =>
    el(
      "button",
      {
        type: "button",
        class: "example",
        "data-value": i,
        "aria-current": i === state.example ? "true" : null,
        on: { click: () => store.set({ example: i, row: 0, first: 0, keyFirst: null }) },
      },
      el("span", { class: "note" }, `${i + 1}`),
      el(
        "span",
        {},
        el("bdi", {}, brief(example.source.text, 90).replace(/ \(.*characters\)$/, "")),
        example.remark ? el("span", { class: "note" }, ` ${example.remark}`) : null,
      ),
    ),
  );
  byId("examples").replaceChildren(
    el("p", { class: "label" }, plural(examples.length, "example")),
    el("div", { class: "example-list" }, list),
  );
  bringIntoView(byId("examples").querySelector(".example-list"));
}

// Scroll the list, and not the page, to the example that is shown.
function bringIntoView(list) {
  const current = list.querySelector("[aria-current]");
  if (!current) return;
  const [top, height] = [current.offsetTop - list.offsetTop, list.clientHeight];
  if (top < list.scrollTop || top + current.offsetHeight > list.scrollTop + height) list.scrollTop = top - height / 2;
}

// The switch that has the focus, so that drawing anew does not lose it.
function focused() {
  const active = document.activeElement;
  const group = active?.closest("[role=group],nav,section,.control-row")?.getAttribute("aria-label");
  if (active?.dataset?.value === undefined) return () => {};
  const inView = byId("view").contains(active);
  return () => {
    const groups = group ? document.querySelectorAll(`[aria-label="${CSS.escape(group)}"]`) : [document];
    for (const each of groups)
      each.querySelector(`[data-value="${CSS.escape(active.dataset.value)}"]`)?.focus({ preventScroll: true });
    if (inView && document.activeElement === document.body) byId("view").focus({ preventScroll: true });
  };
}

// Of the picture that shares the view with a column at its side (as style.css says) or, in a narrow one, has all of it.
function widthOfPicture(full) {
  const shared = full - 390;
  return shared >= 450 ? Math.min(880, shared) : Math.max(NARROWEST, Math.min(880, full - FRAME));
}

async function render() {
  const mine = (turn += 1);
  const restore = focused();
  const views = viewsOf(context);
  const view = views.find(({ value }) => value === store.get().view)?.value ?? "attention";
  const state = { ...store.get(), view };
  document.body.dataset.view = view;
  listExamples(state);
  byId("tabs").replaceChildren(views.length > 1 ? segmented("View", views, view, (value) => store.set({ view: value })) : "");
  context.full = byId("view").clientWidth;
  context.width = widthOfPicture(context.full);
  let drawn;
  try {
    drawn = await DRAW[view](context);
  } catch (error) {
    drawn = {
      element: el("p", { class: "error", role: "alert" }, `This cannot be shown: ${brief(String(error.message), 400)}`),
    };
  }
  if (mine !== turn) return;
  context.shown = drawn;
  byId("view").replaceChildren(drawn.element);
  restore();
  document.body.dataset.ready = String(mine);
}

start();
