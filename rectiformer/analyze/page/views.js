// The views that have something to show, in the order of their tabs.

const VIEWS = [
  { value: "attention", text: "Attention", has: () => true },
  { value: "heads", text: "Heads", has: ({ books }) => books.some(({ examples }) => examples.length) },
  { value: "gold", text: "Gold links", has: ({ books }) => books.some(({ examples }) => examples.some(isLinked)) },
  { value: "test", text: "Test set", has: ({ findings }) => findings.some(Boolean) },
  { value: "compare", text: "Compare", has: ({ books }) => books.length > 1 },
];

function isLinked({ gold, target, sites }) {
  return gold && target && sites.some(({ kind }) => kind === "cross");
}

export function viewsOf(context) {
  return VIEWS.filter(({ has }) => has(context));
}
