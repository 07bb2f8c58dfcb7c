// What is shown: one object, changed here only, kept in the address so that a view can be linked to.

import { ordinal } from "./text.js";

const DEFAULTS = {
  view: "attention",
  model: 0,
  example: 0,
  kind: "cross",
  layer: null,
  heads: null,
  unit: "word",
  color: "weight",
  scale: "layer",
  edges: "auto",
  threshold: 0,
  filter: "all",
  row: 0,
  first: 0,
  keyFirst: null,
  scope: "example",
  aligner: null,
  comparing: "sides",
  otherLayer: null,
  otherHeads: null,
};
const LINKED = [
  "view",
  "model",
  "example",
  "kind",
  "layer",
  "heads",
  "unit",
  "color",
  "scale",
  "edges",
  "filter",
  "row",
  "first",
  "comparing",
];

// A store: `get` the state, `set` some of it, hear of changes.
export function createStore(initial = {}) {
  const listeners = [];
  let state = { ...DEFAULTS, ...initial };
  return {
    get: () => state,
    set(patch) {
      state = { ...state, ...patch };
      listeners.forEach((listener) => listener(state, patch));
    },
    listen: (listener) => listeners.push(listener),
  };
}

// The part of the state that an address says. Layers and heads count from 1 in it, as the page shows them.
export function fromAddress(hash) {
  const found = {};
  for (const [name, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (!LINKED.includes(name)) continue;
    if (name === "heads") found.heads = text.split(",").filter(Boolean).map(Number).filter(Number.isInteger).map((each) => each - 1);
    else if (name === "layer") found.layer = Math.max(0, (Number.parseInt(text, 10) || 0) - 1);
    else if (typeof DEFAULTS[name] === "number")
      found[name] = Math.max(0, Number.parseInt(text, 10) || 0);
    else found[name] = text;
  }
  return found;
}

function encoded(name, value) {
  if (name === "heads") return value.map(ordinal);
  return name === "layer" ? ordinal(value) : value;
}

// Put the state into the address; a page inside an iframe has none of its own and goes without.
export function toAddress(state) {
  const words = LINKED.filter((name) => state[name] !== null && String(state[name]) !== String(DEFAULTS[name]));
  const hash = words.map((name) => `${name}=${encodeURIComponent(encoded(name, state[name]))}`).join("&");
  try {
    history.replaceState(null, "", `#${hash}`);
  } catch {
    // about:srcdoc refuses; nothing else depends on the address
  }
}
