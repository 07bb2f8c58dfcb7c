// Word links out of cross attention, and how they compare with gold: the same rules as rectiformer.measure.alignment.

export const AVERAGE = "average";
export const INDUCTIONS = ["normal", "shifted"];

function piecesWithoutEnd({ pieces }) {
  const last = pieces.at(-1);
  return last && last[1] === last[2] ? pieces.length - 1 : pieces.length;
}

function wordsOf(side) {
  const words = side.pieces.map(() => []);
  side.words.forEach(([first, last], word) => {
    for (let piece = first; piece < last; piece += 1) words[piece].push(word);
  });
  return words;
}

// The dense row that a target piece takes: "normal" of the step that generates it, "shifted" of the step that reads it.
function rowFor(site, head, piece, induction, width) {
  const query = piece + (induction === "shifted" ? 1 : 0);
  const row = new Float32Array(width);
  const heads = head === AVERAGE ? Array.from({ length: site.heads }, (_, each) => each) : [head];
  for (const each of heads) {
    const index = site.rowOf(each, query);
    for (let at = site.rowStarts[index]; at < site.rowStarts[index + 1]; at += 1) {
      if (site.columns[at] < width) row[site.columns[at]] += site.weights[at];
    }
  }
  if (head === AVERAGE)
    row.forEach((sum, key) => {
      row[key] = sum / site.heads;
    });
  return row;
}

function largest(row) {
  let best = -1;
  row.forEach((weight, key) => {
    if (weight > (best < 0 ? 0 : row[best])) best = key;
  });
  return best;
}

// Links "i-j" of words: each target piece is linked with the source piece it weighs most, if it weighs any.
export function predict(example, site, { head, induction }) {
  const width = piecesWithoutEnd(example.source);
  const [sources, targets] = [wordsOf(example.source), wordsOf(example.target)];
  const links = new Set();
  for (let piece = 0; piece < site.queries - 1; piece += 1) {
    const key = largest(rowFor(site, head, piece, induction, width));
    if (key < 0) continue;
    for (const i of sources[key]) for (const j of targets[piece]) links.add(`${i}-${j}`);
  }
  return links;
}

// Weights of words [target][source] as the links were read: sum over source pieces, mean over target pieces.
export function wordWeights(example, site, { head, induction }) {
  const width = piecesWithoutEnd(example.source);
  return example.target.words.map(([first, last]) => {
    const sums = new Float64Array(example.source.words.length);
    for (let piece = first; piece < Math.min(last, site.queries - 1); piece += 1) {
      const row = rowFor(site, head, piece, induction, width);
      example.source.words.forEach(([from, to], word) => {
        for (let key = from; key < Math.min(to, width); key += 1) sums[word] += row[key] / (last - first);
      });
    }
    return sums;
  });
}

// Sort links into hits, misses and false ones, and count what an error rate needs.
export function judge(links, gold) {
  const name = ([i, j]) => `${i}-${j}`;
  const sure = new Set(gold.sure.map(name));
  const possible = new Set([...sure, ...gold.possible.map(name)]);
  const kept = Array.from(links);
  const hits = kept.filter((link) => possible.has(link));
  return {
    hits,
    misses: Array.from(sure).filter((link) => !links.has(link)),
    falses: kept.filter((link) => !possible.has(link)),
    allowed: Array.from(possible).filter((link) => !sure.has(link) && !links.has(link)),
    counts: {
      foundSure: kept.filter((link) => sure.has(link)).length,
      foundPossible: hits.length,
      links: links.size,
      sure: sure.size,
    },
  };
}

// Error, precision and recall of counts summed over sentences.
export function score(list) {
  const sum = (name) => list.reduce((total, counts) => total + counts[name], 0);
  const [foundSure, foundPossible, links, sure] = ["foundSure", "foundPossible", "links", "sure"].map(sum);
  return {
    aer: links + sure > 0 ? 1 - (foundSure + foundPossible) / (links + sure) : 0,
    precision: links ? foundPossible / links : 1,
    recall: sure ? foundSure / sure : 1,
  };
}

// The examples of a book that can be compared with gold, with their cross attention of one layer, loaded.
export async function judged(book, layer) {
  const fit = book.examples.filter((example) => example.gold && example.target && example.site("cross", layer));
  await Promise.all(fit.map((example) => example.site("cross", layer).load(["rowStarts", "columns", "weights"])));
  return fit;
}

// Every layer, head and induction with its score over the examples of a book, the best one first.
export async function rank(book) {
  const layers = Array.from(new Set(book.examples.flatMap((example) => example.layers("cross"))));
  const rows = [];
  for (const layer of layers) {
    const examples = await judged(book, layer);
    const heads = [...Array.from({ length: examples[0]?.site("cross", layer).heads ?? 0 }, (_, head) => head), AVERAGE];
    for (const head of heads) {
      for (const induction of INDUCTIONS) {
        const counts = examples.map(
          (example) => judge(predict(example, example.site("cross", layer), { head, induction }), example.gold).counts,
        );
        if (counts.length) rows.push({ layer, head, induction, ...score(counts) });
      }
    }
  }
  return rows.sort((a, b) => a.aer - b.aer);
}
