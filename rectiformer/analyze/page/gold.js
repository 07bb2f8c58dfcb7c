// Links of one head vs. gold links: hits, misses and false ones as different shapes over the weights.

import { weightColor } from "./colors.js";
import { modelControl } from "./controls.js";
import { el, picker, segmented, svg } from "./dom.js";
import { figure, tableOf } from "./figure.js";
import { AVERAGE, INDUCTIONS, judge, judged, predict, rank, score, wordWeights } from "./links.js";
import { bestAligner, resolve } from "./selection.js";
import { fit, isRightToLeft, number, ordinal, visible, widthOf, wordTexts } from "./text.js";

const CELL = 28;
const WIDEST = 130; // pixels of a word
const NULLS = 30; // of the null column
const NAMES = {
  hit: "hit: in gold",
  miss: "miss: sure in gold, not found",
  false: "false: found, not in gold",
  allowed: "possible in gold, not found (no error)",
};

export async function goldView(context) {
  const { example, book } = resolve(context);
  if (!example?.gold || !example.target || !example.layers("cross").length)
    return { element: absent(book, context.store) };
  const { aligner, why } = await chooseAligner(context, book, example);
  const site = await example.site("cross", aligner.layer).load();
  const verdict = judge(predict(example, site, aligner), example.gold);
  const set = (await judged(book, aligner.layer)).map(
    (each) => judge(predict(each, each.site("cross", aligner.layer), aligner), each.gold).counts,
  );
  const tested = context.findings[context.store.get().model]?.alignment?.find(
    (row) => row.layer === aligner.layer && row.head === aligner.head && row.induction === aligner.induction,
  );
  const scores = [
    ["this sentence", score([verdict.counts])],
    [`${set.length} sentences in this file`, score(set)],
  ];
  if (tested) scores.push(["test set", tested]);
  return {
    element: el(
      "div",
      { class: "gold" },
      controls(context, example, site, aligner, why),
      el(
        "div",
        { class: "stage" },
        matrix(context, example, site, aligner, verdict),
        el("aside", {}, scoreCard(scores), legendCard(verdict)),
      ),
    ),
  };
}

function absent(book, store) {
  const other = book?.examples.findIndex((example) => example.gold && example.layers("cross").length) ?? -1;
  return el(
    "p",
    { class: "empty" },
    "This example has no gold links. ",
    other >= 0
      ? el("button", { type: "button", on: { click: () => store.set({ example: other }) } }, "Show one that has")
      : "Give links with the data to see hits and misses here.",
  );
}

// The layer, head and induction whose links are shown, and why these.
async function chooseAligner({ store, findings }, book, example) {
  const { aligner, model } = store.get();
  const fits = (each) => each && example.site("cross", each.layer)?.heads > (each.head === AVERAGE ? 0 : each.head);
  if (fits(aligner)) return { aligner, why: "chosen by you" };
  const best = bestAligner(findings[model]);
  if (fits(best)) return { aligner: best, why: "the lowest error of all layers, heads and inductions on the test set" };
  book.ranking ??= rank(book);
  const ranked = (await book.ranking).find(fits);
  return { aligner: ranked, why: "the lowest error of all layers, heads and inductions in this file" };
}

function controls(context, example, site, aligner, why) {
  const { store } = context;
  const change = (patch) =>
    store.set({ aligner: { layer: aligner.layer, head: aligner.head, induction: aligner.induction, ...patch } });
  const headName = aligner.head === AVERAGE ? "mean of heads" : `head ${ordinal(aligner.head)}`;
  const layers = example.layers("cross").map((value) => ({ value, text: String(ordinal(value)) }));
  const heads = [
    ...Array.from({ length: site.heads }, (_, value) => ({ value, text: `head ${ordinal(value)}` })),
    { value: AVERAGE, text: "mean of heads" },
  ];
  return el(
    "div",
    { class: "controls" },
    el(
      "div",
      { class: "control-row" },
      modelControl(context),
      segmented("Layer", layers, aligner.layer, (layer) => change({ layer })),
      picker("Links from", heads, aligner.head, (head) => change({ head: head === AVERAGE ? head : Number(head) })),
      segmented(
        "Induction",
        INDUCTIONS.map((value) => ({ value, text: value })),
        aligner.induction,
        (induction) => change({ induction }),
      ),
      el(
        "button",
        { type: "button", class: "quiet", "data-value": "best", on: { click: () => store.set({ aligner: null }) } },
        "best",
      ),
    ),
    el(
      "p",
      { class: "note", "data-aligner": `${aligner.layer} ${aligner.head} ${aligner.induction}` },
      `Layer ${ordinal(aligner.layer)}, ${headName}, ${aligner.induction}: ${why}. `,
      aligner.induction === "normal"
        ? "A target piece takes the row of the step that generates it."
        : "A target piece takes the row of the step that reads it.",
    ),
  );
}

function matrix(context, example, site, aligner, verdict) {
  const weights = wordWeights(example, site, aligner);
  const most = Math.max(0, ...weights.map((row) => Math.max(0, ...row.map(Math.abs))));
  const [source, target] = [wordTexts(example.source), wordTexts(example.target)];
  const longest = Math.min(WIDEST, Math.max(50, context.full * 0.22));
  const widest = (list) => Math.min(longest, Math.max(0, ...list.map((word) => widthOf(word)))) + 2;
  const [left, top] = [widest(target) + 12 + NULLS, widest(source) * 0.8 + 16];
  const [width, height] = [left + source.length * CELL + 70, top + target.length * CELL + 12];
  const at = (link) => link.split("-").map(Number);
  const shapes = [
    ["hit", verdict.hits],
    ["miss", verdict.misses],
    ["false", verdict.falses],
    ["allowed", verdict.allowed],
  ].flatMap(([kind, links]) =>
    links
      .map(at)
      .map(([i, j]) => shape(kind, left + (i + 0.5) * CELL, top + (j + 0.5) * CELL, { "data-link": `${i}-${j}` })),
  );
  // The words and the null column stay where they are while the matrix is scrolled.
  const labels = svg(
    "g",
    { class: "kept" },
    svg("rect", { class: "backing", width: left - 1, height }),
    svg("text", { class: "heading", x: left - NULLS / 2 - 2, y: top - 8, "text-anchor": "middle" }, "null"),
    target.map((word, j) => targetLabel(word, left, top + (j + 0.5) * CELL, weights[j], longest)),
  );
  const drawing = svg(
    "svg",
    {
      class: "alignment",
      role: "img",
      "aria-label":
        `${verdict.hits.length} hits, ${verdict.misses.length} misses, ${verdict.falses.length} false links. ` +
        "The button Table shows them as text.",
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      "data-hits": verdict.hits.length,
      "data-misses": verdict.misses.length,
      "data-falses": verdict.falses.length,
    },
    grid(source.length, target.length, left, top),
    cells(weights, most, left, top),
    source.map((word, i) => sourceLabel(word, left + (i + 0.5) * CELL, top, longest)),
    shapes,
    labels,
  );
  const body = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Links" }, drawing);
  body.addEventListener("scroll", () => labels.setAttribute("transform", `translate(${body.scrollLeft} 0)`));
  return figure({
    title: "Links and gold",
    wide: true,
    name: "gold",
    body,
    note: `Rows are target words, columns source words. Shading is the raw weight, 0 (blank) to ${number(most)}; a mark in the null column: all weights are 0.`,
    table: () => ({
      columns: ["source", "source word", "target", "target word", "verdict", "weight"],
      rows: linkRows(verdict, source, target, weights),
    }),
  });
}

function linkRows(verdict, source, target, weights) {
  const groups = { hit: verdict.hits, miss: verdict.misses, false: verdict.falses, possible: verdict.allowed };
  return Object.entries(groups).flatMap(([kind, links]) =>
    links.map((link) => {
      const [i, j] = link.split("-").map(Number);
      return [ordinal(i), source[i], ordinal(j), target[j], kind, weights[j][i]];
    }),
  );
}

function grid(columns, rows, left, top) {
  const lines = [];
  for (let i = 0; i <= columns; i += 1) lines.push(`M${left + i * CELL} ${top}v${rows * CELL}`);
  for (let j = 0; j <= rows; j += 1) lines.push(`M${left} ${top + j * CELL}h${columns * CELL}`);
  return svg("path", { class: "grid", d: lines.join("") });
}

function cells(weights, most, left, top) {
  return weights.flatMap((row, j) =>
    Array.from(row, (weight, i) =>
      weight === 0
        ? null
        : svg(
            "rect",
            {
              class: "weight-cell",
              x: left + i * CELL + 1,
              y: top + j * CELL + 1,
              width: CELL - 2,
              height: CELL - 2,
              fill: weightColor(weight, most),
            },
            svg("title", {}, `weight ${number(weight, 5)}`),
          ),
    ),
  );
}

function sourceLabel(word, x, top, longest) {
  return svg(
    "text",
    { class: "token", transform: `translate(${x + 4} ${top - 8}) rotate(-52)` },
    svg("title", {}, visible(word.slice(0, 300))),
    fit(word, longest),
  );
}

function targetLabel(word, left, y, row, longest) {
  const rtl = isRightToLeft(word);
  const empty = row.every((weight) => weight === 0);
  return svg(
    "g",
    {},
    svg(
      "text",
      { class: "token", x: left - NULLS - 6, y: y + 5, "text-anchor": rtl ? "start" : "end", direction: rtl ? "rtl" : null },
      fit(word, longest),
    ),
    empty
      ? svg("path", {
          class: "null-mark",
          d: `M${left - 20} ${y - 4.5}h9v9h-9zM${left - 20} ${y + 4.5}l9 -9`,
          "data-null": "",
        })
      : null,
  );
}

// A hit is a disc, a miss a diamond, a false link a cross, an allowed one a dotted ring.
function shape(kind, x, y, props = {}) {
  const frame = { class: `link-${kind}`, "data-verdict": kind, ...props };
  if (kind === "hit") return svg("circle", { ...frame, cx: x, cy: y, r: 6 });
  if (kind === "miss") return svg("path", { ...frame, d: `M${x} ${y - 8}l8 8l-8 8l-8 -8z` });
  if (kind === "false") return svg("path", { ...frame, d: `M${x - 6} ${y - 6}l12 12M${x + 6} ${y - 6}l-12 12` });
  return svg("circle", { ...frame, cx: x, cy: y, r: 6 });
}

function scoreCard(scores) {
  const rows = scores.map(([name, { aer, precision, recall }]) => [
    name,
    ...[aer, precision, recall].map((value) => value.toFixed(3)),
  ]);
  const table = tableOf({ columns: ["over", "AER", "precision", "recall"], rows, numbers: ["AER", "precision", "recall"], label: "Scores" });
  table.classList.add("scores");
  scores.forEach(([, each], i) =>
    Object.assign(table.querySelectorAll("tbody tr")[i].dataset, {
      aer: each.aer,
      precision: each.precision,
      recall: each.recall,
    }),
  );
  return el("section", { class: "figure" }, el("h2", { class: "figure-title" }, "Alignment error"), table);
}

function legendCard(verdict) {
  const sizes = {
    hit: verdict.hits.length,
    miss: verdict.misses.length,
    false: verdict.falses.length,
    allowed: verdict.allowed.length,
  };
  return el(
    "section",
    { class: "figure" },
    el("h2", { class: "figure-title" }, "Shapes"),
    Object.entries(NAMES).map(([kind, text]) =>
      el(
        "p",
        { class: "legend" },
        svg("svg", { width: 20, height: 20, "aria-hidden": "true" }, shape(kind, 10, 10, { "data-verdict": null })),
        el("b", {}, String(sizes[kind])),
        text,
      ),
    ),
  );
}
