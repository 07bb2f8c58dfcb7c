// Saving a drawing as an SVG file that looks the same anywhere: styles and pictures embedded.

import { el, svg } from "./dom.js";

const STYLES = [
  "fill",
  "fill-opacity",
  "stroke",
  "stroke-width",
  "stroke-opacity",
  "stroke-dasharray",
  "opacity",
  "font-family",
  "font-size",
  "font-style",
  "font-weight",
  "visibility",
];

// A copy of a drawn <svg> that carries its own styles and background.
export function standalone(drawing) {
  const copy = drawing.cloneNode(true);
  for (const kept of copy.querySelectorAll(".kept")) kept.removeAttribute("transform"); // nothing is scrolled in a file
  const [from, to] = [
    [drawing, ...drawing.querySelectorAll("*")],
    [copy, ...copy.querySelectorAll("*")],
  ];
  from.forEach((element, i) => {
    const computed = getComputedStyle(element);
    for (const name of STYLES) to[i].setAttribute(name, computed.getPropertyValue(name));
    to[i].removeAttribute("class");
    to[i].removeAttribute("tabindex");
  });
  const background = getComputedStyle(document.body).getPropertyValue("--panel").trim();
  copy.prepend(svg("rect", { width: "100%", height: "100%", fill: background }));
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return copy;
}

// A canvas as an <svg>, its dots embedded.
export function fromCanvas(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  return svg(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}` },
    svg("image", {
      width,
      height,
      href: canvas.toDataURL("image/png"),
      "image-rendering": "pixelated",
      preserveAspectRatio: "none",
    }),
  );
}

// Hand an <svg> to the reader as a file.
export function download(drawing, name) {
  const text = new XMLSerializer().serializeToString(drawing);
  const url = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  const link = el("a", { href: url, download: `${name.replace(/[^\w-]+/g, "-").slice(0, 80)}.svg` });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
