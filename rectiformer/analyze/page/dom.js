// Elements out of plain values. Text only ever becomes a text node, so nothing in a corpus can become markup.

const SVG = "http://www.w3.org/2000/svg";

// An HTML element; keys of `props` are attributes, except "on" (listeners) and "class".
export function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

// An SVG element, in the same way.
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// A row of buttons of which one is chosen.
export function segmented(label, options, chosen, choose) {
  const buttons = options.map(({ value, text, title, disabled }) =>
    el(
      "button",
      {
        type: "button",
        title,
        disabled,
        "data-value": value,
        "aria-pressed": String(value === chosen),
        on: { click: () => choose(value) },
      },
      text,
    ),
  );
  return el(
    "div",
    { class: "control" },
    el("span", { class: "label", "aria-hidden": "true" }, label),
    el("div", { class: "segmented", role: "group", "aria-label": label, on: { keydown: moveFocus } }, buttons),
  );
}

// Arrow keys move the focus among the buttons of a group.
export function moveFocus(event) {
  const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
  const buttons = Array.from(event.currentTarget.querySelectorAll("button:not(:disabled)"));
  const next = buttons[buttons.indexOf(document.activeElement) + by];
  event.preventDefault();
  event.stopPropagation();
  next?.focus();
}

// A drop-down list.
export function picker(label, options, chosen, choose) {
  const list = options.map(({ value, text }) =>
    el("option", { value, selected: String(value) === String(chosen) }, text),
  );
  const select = el("select", { "aria-label": label, on: { change: () => choose(select.value) } }, list);
  return el("label", { class: "control" }, el("span", { class: "label" }, label), select);
}

// What is folded away in a narrow window; the context remembers what the reader chose.
export function disclosure(context, summary, ...children) {
  const open = context.unfolded ?? context.full > 700;
  const details = el("details", { class: "disclosure", open }, el("summary", {}, summary), children);
  details.addEventListener("toggle", () => {
    if (details.open !== open) context.unfolded = details.open;
  });
  return details;
}
