// Layers by heads: how often a head is on, how many keys it weighs, which heads are dead or always on.

import { modelControl } from "./controls.js";
import { weightColor } from "./colors.js";
import { el, segmented, svg } from "./dom.js";
import { FRAME, figure } from "./figure.js";
import { SITES, SITE_TITLES, shares } from "./model.js";
import { resolve } from "./selection.js";
import { ordinal, percent, plural } from "./text.js";

const WIDEST = 74; // of a cell
const NARROWEST = 46;
const HIGH = 56;
const GAP = 6;
const LEFT = 62;
const TOP = 34;

export async function mapView(context) {
  const { store } = context;
  const now = resolve(context);
  const scopes = [
    { value: "example", text: "this example" },
    { value: "file", text: `all ${plural(now.book?.examples.length ?? 0, "example")} here` },
    { value: "set", text: "test set", disabled: !context.findings[store.get().model] },
  ];
  const scope = scopes.find(({ value, disabled }) => value === store.get().scope && !disabled)?.value ?? "example";
  const found =
    scope === "set"
      ? fromFindings(context.findings[store.get().model])
      : await fromSites(scope === "file" ? now.book.examples : [now.example]);
  const panels = SITES.filter((kind) => found.some((cell) => cell.kind === kind)).map((kind) =>
    panel(
      context,
      kind,
      found.filter((cell) => cell.kind === kind),
    ),
  );
  return {
    element: el(
      "div",
      { class: "maps" },
      el(
        "div",
        { class: "controls" },
        el(
          "div",
          { class: "control-row" },
          modelControl(context),
          segmented("Counted over", scopes, scope, (value) => store.set({ scope: value })),
        ),
      ),
      el(
        "p",
        { class: "note" },
        "The fill is the share of queries for which a head is on, the bar the share of visible keys it weighs. " +
          "Choose a cell to open its head.",
      ),
      legend(),
      panels.length
        ? el("div", { class: "figures" }, panels)
        : el("p", { class: "empty" }, "No attention of this example is in this file."),
    ),
  };
}

async function fromSites(examples) {
  const sites = examples.filter(Boolean).flatMap((example) => example.sites);
  await Promise.all(sites.map((site) => site.loadFlags()));
  const groups = new Map();
  for (const site of sites) {
    for (let head = 0; head < site.heads; head += 1) {
      const name = `${site.kind} ${site.layer} ${head}`;
      if (!groups.has(name)) groups.set(name, { kind: site.kind, layer: site.layer, head, list: [] });
      groups.get(name).list.push(site.counts(head));
    }
  }
  return Array.from(groups.values(), ({ list, ...cell }) => ({ ...cell, ...shares(list) }));
}

function fromFindings(findings) {
  return findings.sites.flatMap((site) =>
    Array.from({ length: site.heads }, (_, head) => ({
      kind: site.kind,
      layer: site.layer,
      head,
      active: site.active_queries[head],
      nonzero: 1 - site.sparsity[head],
    })),
  );
}

const BADGES = { dead: "\u2205", "always on": "\u25cf" };

function badgeOf({ active }) {
  if (active === 0) return "dead";
  return active === 1 ? "always on" : "";
}

function panel(context, kind, cells) {
  const layers = Array.from(new Set(cells.map((cell) => cell.layer))).sort((a, b) => a - b);
  const heads = Math.max(...cells.map((cell) => cell.head)) + 1;
  const wide = Math.max(NARROWEST, Math.min(WIDEST, Math.floor((context.full - FRAME - LEFT) / heads) - GAP));
  const [width, height] = [LEFT + heads * (wide + GAP), TOP + layers.length * (HIGH + GAP)];
  const drawing = svg(
    "svg",
    { class: "onoff", width, height, viewBox: `0 0 ${width} ${height}`, "data-kind": kind },
    Array.from({ length: heads }, (_, head) =>
      svg(
        "text",
        { class: "heading", x: LEFT + head * (wide + GAP) + wide / 2, y: 20, "text-anchor": "middle" },
        `head ${ordinal(head)}`,
      ),
    ),
    layers.map((layer, row) =>
      svg(
        "text",
        { class: "heading", x: LEFT - 10, y: TOP + row * (HIGH + GAP) + HIGH / 2 + 4, "text-anchor": "end" },
        `layer ${ordinal(layer)}`,
      ),
    ),
    cells.map((cell) =>
      drawCell(context, cell, {
        x: LEFT + cell.head * (wide + GAP),
        y: TOP + layers.indexOf(cell.layer) * (HIGH + GAP),
        wide,
      }),
    ),
  );
  return figure({
    title: SITE_TITLES[kind],
    body: el("div", { class: "scroll" }, drawing),
    name: `heads-${kind}`,
    wide: true,
    note: summary(cells),
    table: () => ({
      columns: ["layer", "head", "active queries", "non-zero keys", "state"],
      rows: cells.map((cell) => [ordinal(cell.layer), ordinal(cell.head), cell.active, cell.nonzero, badgeOf(cell)]),
    }),
  });
}

function summary(cells) {
  const number = (badge) => cells.filter((cell) => badgeOf(cell) === badge).length;
  return `${plural(cells.length, "head")}: ${number("dead")} dead, ${number("always on")} always on.`;
}

function drawCell({ store }, cell, { x, y, wide }) {
  const { kind, layer, head, active, nonzero } = cell;
  const open = () => store.set({ view: "attention", kind, layer, heads: [head], first: 0, row: 0, keyFirst: null });
  const badge = badgeOf(cell);
  const meaning = `active for ${percent(active)} of queries, weighs ${percent(nonzero)} of the keys it sees`;
  const level = (HIGH - 12) * (Number.isFinite(active) ? active : 0);
  return svg(
    "g",
    {
      class: `cell ${badge.replace(" ", "-")}`,
      tabindex: "0",
      role: "button",
      "data-layer": layer,
      "data-head": head,
      "data-active": active,
      "data-nonzero": nonzero,
      "data-badge": badge,
      "aria-label":
        `${kind} layer ${ordinal(layer)} head ${ordinal(head)}: ${percent(active)} ${badge || "active"}, ` +
        `weighs ${percent(nonzero)} of the keys it sees`,
      on: {
        click: open,
        keydown: (event) => {
          if (event.key === "Enter" || event.key === " ") {
            event.preventDefault();
            open();
          }
        },
      },
    },
    svg("title", {}, meaning),
    svg("rect", { class: "cell-frame", x, y, width: wide, height: HIGH, rx: 6 }),
    svg("rect", { class: "cell-level", x: x + 1, y: y + HIGH - 11 - level, width: wide - 2, height: level }),
    svg("rect", { class: "cell-track", x: x + 7, y: y + HIGH - 7, width: wide - 14, height: 3 }),
    svg("rect", {
      x: x + 7,
      y: y + HIGH - 7,
      width: (wide - 14) * (nonzero || 0),
      height: 3,
      fill: weightColor(0.7, 1),
    }),
    svg("text", { class: "cell-number", x: x + wide / 2, y: y + 21, "text-anchor": "middle" }, percent(active)),
    badge
      ? svg(
          "text",
          { class: "cell-badge", x: x + wide / 2, y: y + 37, "text-anchor": "middle", "aria-hidden": "true" },
          `${BADGES[badge]}${wide < WIDEST ? "" : ` ${badge}`}`,
        )
      : null,
  );
}

function legend() {
  return el(
    "div",
    { class: "legend" },
    el(
      "span",
      { class: "note" },
      "\u2205 dead: null for every query. \u25cf always on: never null, as every softmax head is.",
    ),
  );
}
