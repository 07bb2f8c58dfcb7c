// A record as the views read it: examples, their sites, and the rows of a site, decoded when they are first asked for.

import { decode } from "./decode.js";

export const SITES = ["cross", "encoder", "decoder"];
export const SITE_NAMES = { cross: "Cross", encoder: "Encoder", decoder: "Decoder" };
export const SITE_TITLES = {
  cross: "Cross-attention",
  encoder: "Encoder self-attention",
  decoder: "Decoder self-attention",
};
const FIELDS = {
  rowStarts: "row_starts",
  columns: "columns",
  weights: "weights",
  mass: "mass",
  nulls: "null",
  visible: "visible",
};
const FLAGS = ["rowStarts", "nulls", "visible"];

// One attention over one example. Row r is head Math.floor(r / queries), query r % queries.
class Site {
  constructor(json) {
    Object.assign(this, {
      kind: json.kind,
      layer: json.layer,
      heads: json.heads,
      queries: json.queries,
      keys: json.keys,
    });
    this.packed = json;
    this.decoding = {};
  }

  // Decode some of rowStarts, columns, weights, mass, nulls and visible, and put them on the site.
  async load(names = Object.keys(FIELDS)) {
    await Promise.all(
      names.map((name) => {
        this.decoding[name] ??= decode(this.packed[FIELDS[name]]).then((array) => {
          this[name] = array;
        });
        return this.decoding[name];
      }),
    );
    return this;
  }

  // What is needed to say which rows are null and how many keys the others weigh.
  loadFlags() {
    return this.load(FLAGS);
  }

  rowOf(head, query) {
    return head * this.queries + query;
  }

  isNull(head, query) {
    return this.nulls[this.rowOf(head, query)] === 1;
  }

  // Largest absolute weight of all heads: the end of the color scale.
  largest() {
    this.most ??= this.weights.reduce((most, weight) => Math.max(most, Math.abs(weight)), 0);
    return this.most;
  }

  hasNegative() {
    this.negative ??= this.weights.some((weight) => weight < 0);
    return this.negative;
  }

  // Of one head: queries that see keys, null ones among them, keys seen and keys weighed.
  counts(head) {
    const first = head * this.queries;
    const totals = {
      queries: 0,
      nulls: 0,
      seen: 0,
      edges: this.rowStarts[first + this.queries] - this.rowStarts[first],
    };
    for (let row = first; row < first + this.queries; row += 1) {
      totals.queries += this.visible[row] > 0 ? 1 : 0;
      totals.nulls += this.nulls[row];
      totals.seen += this.visible[row];
    }
    return totals;
  }
}

// One sentence pair.
export class Example {
  constructor(json) {
    Object.assign(this, {
      source: json.source,
      target: json.target,
      forced: json.forced,
      translation: json.translation,
    });
    this.gold = json.gold;
    this.sites = json.sites.map((site) => new Site(site));
  }

  site(kind, layer) {
    return this.sites.find((site) => site.kind === kind && site.layer === layer);
  }

  siteKinds() {
    return SITES.filter((kind) => this.sites.some((site) => site.kind === kind));
  }

  layers(kind) {
    return this.sites
      .filter((site) => site.kind === kind)
      .map((site) => site.layer)
      .sort((a, b) => a - b);
  }
}

// One model and its examples.
export class Book {
  constructor(json) {
    if (json.format !== "rectiformer-attention" || json.version !== 1) {
      throw new Error(`this page reads rectiformer-attention version 1, not ${json.format} version ${json.version}`);
    }
    this.card = json.model;
    this.examples = json.examples.map((example) => new Example(example));
  }

  get name() {
    return this.card.name || "model";
  }
}

// Shares over several sites' counts of one head; NaN where nothing was seen.
export function shares(list) {
  const sum = (name) => list.reduce((total, each) => total + each[name], 0);
  return {
    active: 1 - sum("nulls") / sum("queries"),
    nonzero: sum("edges") / sum("seen"),
    edges: sum("edges"),
    nulls: sum("nulls"),
  };
}
