// Type a text, see its translation, and which word was linked to which. Texts enter the page as text only.

const find = (id) => document.getElementById(id);
const [form, source, list, problem, progress] = ["form", "source", "sentences", "problem", "progress"].map(find);
const button = form.querySelector("button");
const NAMES = new Intl.DisplayNames("en", { type: "language" });
let aligns = false;
let languages = ["", ""]; // codes, where the run tells them
let asking = null; // what stops the request that is under way

form.addEventListener("submit", (event) => {
  event.preventDefault();
  translate();
});
source.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    form.requestSubmit();
  }
});
describe();

async function describe() {
  try {
    const model = await request("v1/model");
    aligns = model.aligns;
    languages = [model.source_language, model.target_language].map((code) => code.replace("_", "-"));
    nameLanguages(languages.map(languageName));
    source.lang = languages[0];
    const variants = [...new Set(Object.values(model.variants))].join(", ");
    const named = variants === model.name ? model.name : `${model.name} (${variants})`;
    find("model").textContent = `${named}, at most ${model.limits.max_sentences} sentences at once`;
  } catch (error) {
    problem.textContent = error.message;
  }
  document.body.dataset.ready = "";
}

// "German → English", as far as it is known, and what to type.
function nameLanguages(known) {
  if (known.some(Boolean)) find("languages").textContent = known.map((name) => name || "?").join(" \u2192 ");
  if (known[0]) find("label").textContent = `${known[0]} text, one sentence per line`;
}

function languageName(code) {
  try {
    return code && NAMES.of(code);
  } catch {
    return code; // a file ending that is no code
  }
}

// A newer request replaces one that is under way.
async function translate() {
  const lines = source.value.replace(/\r/g, "").replace(/\n+$/, "").split("\n");
  if (!source.value.trim()) return;
  asking?.abort();
  const own = new AbortController();
  asking = own;
  problem.textContent = "";
  progress.textContent = "Translating\u2026";
  let done = ""; // for those who hear the page
  button.disabled = true;
  try {
    const body = JSON.stringify({ sentences: lines, alignments: aligns });
    const headers = { "Content-Type": "application/json" };
    const answer = await request("v1/translate", { method: "POST", headers, body, signal: own.signal });
    if (asking === own) show(lines, answer.translations);
    done = answer.translations.length === 1 ? "1 sentence translated" : `${answer.translations.length} sentences translated`;
  } catch (error) {
    if (asking === own) problem.textContent = error.message;
  } finally {
    if (asking === own) {
      asking = null;
      progress.textContent = done;
      button.disabled = false;
    }
  }
}

async function request(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("The server cannot be reached.");
  }
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(content.error?.message ?? `The server answered ${answer.status}.`);
  return content;
}

function show(lines, translations) {
  list.replaceChildren(
    ...translations.map(({ text, alignment, warnings }, index) => {
      const item = document.createElement("li");
      const words = { source: alignment?.source_words ?? [], target: alignment?.target_words ?? [] };
      const both = [side(0, lines[index], words.source), side(1, text, words.target)];
      item.append(...both.map(({ line }) => line), ...warnings.map(note));
      for (const each of [0, 1]) follow(both[each], both[1 - each], alignment?.links ?? [], each);
      return item;
    }),
  );
}

function note(text) {
  const line = document.createElement("p");
  line.className = "note";
  line.textContent = text;
  return line;
}

// A line with a span for each word; spans count code points, as Python does.
function side(which, text, spans) {
  const line = document.createElement("bdi");
  line.className = ["source", "target"][which];
  line.lang = languages[which];
  line.dir = "auto";
  const characters = Array.from(text);
  const between = (start, stop) => characters.slice(start, stop).join("");
  let at = 0;
  const words = spans.map(([start, stop]) => {
    const word = document.createElement("span");
    word.className = "word";
    word.textContent = between(start, stop);
    line.append(between(at, start), word);
    at = stop;
    return word;
  });
  line.append(between(at));
  return { line, words };
}

// Mark the words that one is linked to: under the pointer, or where the arrow keys have led.
function follow(here, there, links, which) {
  const mark = (number, on) => {
    here.words[number].classList.toggle("linked", on);
    for (const link of links) if (link[which] === number) there.words[link[1 - which]].classList.toggle("linked", on);
  };
  here.words.forEach((word, number) => {
    word.tabIndex = number ? -1 : 0;
    const linked = links.filter((link) => link[which] === number).map((link) => there.words[link[1 - which]].textContent);
    word.title = linked.length ? `linked to ${linked.join(", ")}` : "linked to no word";
    for (const [name, on] of [["mouseenter", true], ["focus", true], ["mouseleave", false], ["blur", false]]) {
      word.addEventListener(name, () => mark(number, on));
    }
    word.addEventListener("keydown", ({ key }) => {
      const next = here.words[number + { ArrowRight: 1, ArrowLeft: -1 }[key]];
      if (!next) return;
      word.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
  });
}
