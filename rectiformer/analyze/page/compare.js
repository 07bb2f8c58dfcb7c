// Two models on the same sentence: side by side with one pointer, or as what only one of them weighs.

import {
  edgeControl,
  headControl,
  kindControl,
  layerControl,
  scaleControl,
  thresholdControl,
  thresholdOf,
  unitControl,
} from "./controls.js";
import { difference } from "./difference.js";
import { disclosure, el, segmented } from "./dom.js";
import { sceneOf } from "./scene.js";
import { resolve } from "./selection.js";
import { sideBySide } from "./sides.js";
import { percent } from "./text.js";

const LETTERS = "AB";

export async function compareView(context) {
  const { store, books } = context;
  const sides = books.map((_, model) => ({ ...resolve(context, model), own: model === store.get().model }));
  const problem = obstacle(sides);
  if (problem) return { element: el("p", { class: "empty" }, problem) };
  await Promise.all(sides.map(({ site }) => site.load()));
  for (const side of sides) side.scene = sceneOf(side, { ...store.get(), filter: "all" });
  const same = sameUnits(sides[0].scene, sides[1].scene);
  const mode = same ? store.get().comparing : "sides";
  const stage = el("div", {});
  let drawn = null;
  const show = () => {
    drawn = mode === "difference" ? difference(context, sides) : sideBySide(context, sides, same);
    stage.replaceChildren(drawn.element);
  };
  show();
  const update = (patch) => {
    const names = Object.keys(patch);
    if (names.every((name) => name === "row")) return drawn.point(store.get().row);
    if (!names.every((name) => name === "threshold")) return false;
    show();
    return true;
  };
  const { indices, rows } = sides[store.get().model].scene;
  const element = el("div", { class: "compare" }, controls(context, sides, mode, same), stage);
  return { element, update, arrows: true, rows: indices.length, inWindow: rows.length };
}

function obstacle(sides) {
  if (sides.length < 2) return "This page has one model. Give two records, or two runs, to compare them.";
  if (!sides.every(({ site }) => site)) return "One of the models has no such attention of this example.";
  const [a, b] = sides.map(({ example }) => example.source.text);
  return a === b ? "" : "The two records have different sentences here.";
}

function labels(units) {
  return units.map((unit) => unit.label).join("\u0000");
}

function sameUnits(a, b) {
  return labels(a.keys) === labels(b.keys) && labels(a.queries) === labels(b.queries);
}

function controls(context, sides, mode, same) {
  const { store } = context;
  const modes = [
    { value: "sides", text: "side by side" },
    { value: "difference", text: "difference", disabled: !same, title: same ? "" : "needs the same words in both" },
  ];
  return el(
    "div",
    { class: "controls" },
    el(
      "div",
      { class: "control-row" },
      segmented("Compare", modes, mode, (comparing) => store.set({ comparing })),
      kindControl(sides[store.get().model], store),
    ),
    disclosure(
      context,
      "More switches: words, edges, scale",
      el(
        "div",
        { class: "control-row" },
        unitControl(store),
        edgeControl(store),
        scaleControl(store),
        thresholdControl(store, (state) => `${percent(thresholdOf(state))} of the largest`),
      ),
    ),
    sides.map((side) =>
      el(
        "div",
        { class: "control-row" },
        el("span", { class: "side-name" }, `${LETTERS[side.model]} \u00b7 ${side.book.name}`),
        layerControl(side, (layer) => store.set(side.own ? { layer } : { otherLayer: layer })),
        headControl(
          side,
          (heads) => store.set(side.own ? { heads, layer: side.layer } : { otherHeads: heads, otherLayer: side.layer }),
          { label: `Heads of ${LETTERS[side.model]}`, off: context.live?.switchFor(side) },
        ),
      ),
    ),
    same
      ? null
      : el(
          "p",
          { class: "note" },
          "The models split or translate this sentence differently: rows are each model's own, " +
            "and only source words are pointed at together.",
        ),
  );
}
