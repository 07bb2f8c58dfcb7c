// Which model, example, site and heads the state means, whatever an address or an earlier example asked for.

const DOCUMENT = 200; // queries

// The alignment row with the least error of one model's findings, or null.
export function bestAligner(findings) {
  const rows = findings?.alignment ?? [];
  return rows.reduce((best, row) => (best === null || row.aer < best.aer ? row : best), null);
}

// {model, book, example, kind, layer, site, heads}; site is undefined where the example has none.
export function resolve(context, model = context.store.get().model) {
  const state = context.store.get();
  const book = context.books[Math.min(model, context.books.length - 1)];
  const example = book?.examples[Math.min(state.example, book.examples.length - 1)];
  if (!example) return { model, book, heads: [] };
  const kind = example.siteKinds().includes(state.kind) ? state.kind : example.siteKinds()[0];
  const asked = model === state.model ? state : { layer: state.otherLayer, heads: state.otherHeads };
  const best = kind === "cross" && asked.layer === null ? bestAligner(context.findings[model]) : null;
  const layers = example.layers(kind);
  const wanted = asked.layer ?? best?.layer;
  const layer = layers.includes(wanted) ? wanted : layers.at(-1);
  const site = example.site(kind, layer);
  return { model, book, example, kind, layer, site, heads: chooseHeads(site, asked.heads, best) };
}

// What was asked for; else the head that aligns best, one head of a document, or all heads of a sentence.
function chooseHeads(site, asked, best) {
  const all = Array.from({ length: site?.heads ?? 0 }, (_, head) => head);
  if (asked) return all.filter((head) => asked.includes(head));
  if (Number.isInteger(best?.head)) return [best.head];
  return site?.queries > DOCUMENT ? all.slice(0, 1) : all;
}
