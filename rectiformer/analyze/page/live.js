// The served page: type a sentence, force a target, switch heads off, and see what changes.

import { el, svg } from "./dom.js";
import { Book, Example } from "./model.js";
import { brief, ordinal } from "./text.js";

const NAMES = new Intl.DisplayNames("en", { type: "language", fallback: "none" });

const LONGEST = 20000;

// The panel above the views, and a switch for each head in them.
export class Live {
  constructor(context, { models = [], languages = [], examples = [] }) {
    Object.assign(this, { context, languages, models: Math.max(1, models.length), off: [], whole: null, busy: false });
    const inLanguage = (code) => (languageName(code) ? ` in ${languageName(code)}` : "");
    this.source = field("Source", `Type a sentence${inLanguage(languages[0])} to translate`, languages[0]);
    this.target = field(
      "Forced target",
      `Force this target${inLanguage(languages[1])} instead of the model\u2019s own (optional)`,
      languages[1],
    );
    this.references = new Map(examples);
    this.button = el("button", { type: "submit", class: "primary" }, "Translate");
    this.switches = el("div", { class: "live-off" });
    this.result = el("div", { class: "live-result", "aria-live": "polite" });
    this.choices = examples.length ? this.offer(examples) : null;
    this.form = el(
      "form",
      { class: "live", on: { submit: (event) => this.submit(event), keydown: (event) => this.enter(event) } },
      el("div", { class: "live-fields" }, this.source, this.target, this.button),
      this.choices,
      this.switches,
      this.result,
    );
  }

  // Validation sentences to click.
  offer(examples) {
    const choose = (source) => () => {
      this.source.value = source;
      this.target.value = "";
      this.ask(this.off);
    };
    const button = ([source]) =>
      el(
        "button",
        { type: "button", class: "choice", lang: this.languages[0] || null, dir: "auto", on: { click: choose(source) } },
        brief(source, 160),
      );
    return el(
      "details",
      { class: "disclosure choices", open: true },
      el("summary", {}, "Example sentences, from the validation text"),
      el("div", { class: "choice-list" }, examples.map(button)),
    );
  }

  submit(event) {
    event.preventDefault();
    this.ask(this.off);
  }

  // Enter sends, Shift-Enter starts a line.
  enter(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || !event.target.matches("textarea")) return;
    event.preventDefault();
    this.form.requestSubmit();
  }

  // Translate with some heads off, by every model.
  async ask(off) {
    if (!this.source.value.trim() || this.busy) return;
    this.busy = true;
    this.button.disabled = true;
    this.result.replaceChildren(el("p", { class: "note" }, "Translating\u2026"));
    try {
      const answers = [];
      for (let model = 0; model < this.models; model += 1) {
        answers.push(await translate(this.question(model, off)));
      }
      this.busy = false;
      this.take(answers, off);
    } catch (error) {
      this.result.replaceChildren(el("p", { class: "error", role: "alert" }, brief(String(error.message))));
    } finally {
      this.busy = false;
      this.button.disabled = false;
    }
  }

  // What to ask of a model; a head that is off is off in one model only.
  question(model, off) {
    const own = off.filter((head) => head[0] === model).map((head) => head.slice(1));
    const target = this.target.value.trim() ? { target: this.target.value } : {};
    return { source: this.source.value, ...target, off: own, model };
  }

  take(answers, off) {
    this.off = off;
    const source = this.source.value;
    if (!off.length) this.whole = { source, answers };
    if (this.choices && !this.context.books.length) this.choices.open = false; // it has done its work
    answers.forEach(({ record }, model) => {
      const { books } = this.context;
      if (books[model]) books[model].examples.push(new Example(record.examples[0]));
      else books[model] = new Book(record);
      books[model].examples.at(-1).remark = off.length
        ? `without ${off.map((head) => this.nameOf(head)).join(", ")}`
        : "";
    });
    const before = off.length && this.whole?.source === source ? this.whole.answers : null;
    this.result.replaceChildren(
      ...answers.map((answer, model) =>
        translationLine(this.context.books, model, answer, before?.[model], this.languages[1]),
      ),
      this.references.has(source) ? referenceLine(this.references.get(source), this.languages[1]) : "",
    );
    this.showSwitches();
    const example = this.context.books[0].examples.length - 1;
    this.context.store.set({ example, row: 0, first: 0, keyFirst: null });
  }

  showSwitches() {
    const chips = this.off.map((head) => {
      const on = { click: () => this.flip(head) };
      return el(
        "button",
        { type: "button", class: "quiet", title: "switch on again", on },
        `${this.nameOf(head)} \u00d7`,
      );
    });
    this.switches.replaceChildren(...(chips.length ? [el("span", { class: "label" }, "Switched off"), ...chips] : []));
  }

  nameOf([model, kind, layer, head]) {
    return `${this.models > 1 ? `${"AB"[model]} ` : ""}${kind} layer ${ordinal(layer)} head ${ordinal(head)}`;
  }

  isOff(head) {
    return this.off.some((each) => String(each) === String(head));
  }

  flip(head) {
    this.ask(this.isOff(head) ? this.off.filter((each) => String(each) !== String(head)) : [...this.off, head]);
  }

  // For the heads of a site: a button that takes one out of the model, or puts it back.
  switchFor({ model, kind, layer }) {
    return (head) => {
      const switched = [model, kind, layer, head];
      const off = this.isOff(switched);
      const title = off ? `switch head ${ordinal(head)} on again` : `switch head ${ordinal(head)} off and translate again`;
      const props = { type: "button", class: "power", title, "aria-label": title, "aria-pressed": String(off) };
      return el("button", { ...props, "data-power": head, on: { click: () => this.flip(switched) } }, powerSign());
    };
  }
}

function powerSign() {
  const shape = svg("path", {
    d: "M6 1v5M3 2.6a4.4 4.4 0 1 0 6 0",
    fill: "none",
    stroke: "currentColor",
    "stroke-width": 1.5,
  });
  return svg("svg", { width: 12, height: 12, "aria-hidden": "true" }, shape);
}

// A code such as "de" in English, or "" for none.
export function languageName(code) {
  try {
    return code ? (NAMES.of(code.replace("_", "-")) ?? code) : "";
  } catch {
    return code;
  }
}

function field(label, placeholder, code) {
  return el("textarea", { rows: 2, maxlength: LONGEST, dir: "auto", lang: code || null, "aria-label": label, placeholder });
}

async function translate(question) {
  const body = JSON.stringify(question);
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch("api/translate", { method: "POST", headers, body });
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(content.error?.message ?? `the server answered ${answer.status}`);
  return content;
}

// A model's translation; where heads are off, compared with what it was with all of them.
function translationLine(books, model, { translation, score }, before, lang) {
  const changed = before !== undefined && before.translation !== translation;
  const name = books.length > 1 ? `${"AB"[model]} \u00b7 ${books[model].name}` : "translation";
  const line = (label, ...parts) => el("p", { class: "sentence" }, el("span", { class: "label" }, label), parts);
  return el(
    "div",
    { "data-translation": translation, "data-changed": changed ? "1" : "0" },
    line(name, marked(translation, before?.translation, lang), el("span", { class: "note" }, ` ${scored(score, before)}`)),
    changed ? line("with all heads", el("bdi", { class: "note" }, brief(before.translation, 600))) : null,
  );
}

function scored(score, before) {
  const digits = score.toFixed(3);
  if (before === undefined) return `score ${digits}`;
  const whole = before.score.toFixed(3);
  return whole === digits ? `score ${digits}, unchanged` : `score ${digits}, with all heads ${whole}`;
}

function referenceLine(text, code) {
  const shown = el("bdi", { lang: code || null }, brief(text, 600));
  return el("p", { class: "sentence reference" }, el("span", { class: "label" }, "reference"), shown);
}

// A translation with the words marked that the one before did not have.
function marked(text, before = text, lang = "") {
  const known = new Set(before.split(" "));
  const words = brief(text, 600).split(" ");
  return el(
    "bdi",
    { lang: lang || null },
    words.map((word, i) => [i ? " " : "", known.has(word) ? word : el("mark", {}, word)]),
  );
}
