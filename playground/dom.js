// Elements. Every text goes in as text: what a reader types, or a model writes, is never read as HTML.

import { text } from "./texts.js";

const NAMESPACE = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "hidden" || name === "disabled") element[name] = value;
    else if (value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(NAMESPACE, tag), attributes, children);

export const button = (label, click, attributes = {}) => h("button", { type: "button", onclick: click, ...attributes }, label);

/** A labelled slider that shows its value; `change(value)` is called while it moves. */
export function slider(name, label, { min, max, step, value, show = String, change }) {
  const output = h("output", {}, show(value));
  const input = h("input", {
    type: "range", id: name, min, max, step, value,
    oninput: () => {
      output.textContent = show(Number(input.value));
      change(Number(input.value));
    },
  });
  // `for`: else the label would be that of its first element that can have one, the output.
  return h("label", { class: "slider", for: name }, h("span", {}, label, " ", output), input);
}

/** A labelled choice; choices: [[value, label]]. */
export function choice(name, label, choices, value, change) {
  const select = h("select", { id: name, onchange: () => change(select.value) },
    choices.map(([key, shown]) => h("option", { value: key }, shown)));
  select.value = value;
  return h("label", { class: "choice", for: name }, label, " ", select);
}

export const check = (name, label, checked, change) => h("label", { class: "check", for: name },
  h("input", { type: "checkbox", id: name, checked, onchange: ({ target }) => change(target.checked) }), " ", label);

export const number = (x, digits = 2) => x.toFixed(digits).replace(/^-(?=0\.?0*$)/, "").replace("-", "−");
export const signed = (x, digits = 2) => (x > 0 ? "+" : "") + number(x, digits);

/** Bars to both sides of a middle line, one for each value, in one picture. */
export function bars(values, limit) {
  const size = (x) => Math.min(1, Math.abs(x) / limit) * 48;
  return svg("svg", { viewBox: `0 0 ${values.length * 12} 104`, class: "bars", role: "img",
    "aria-label": values.map((x) => signed(x)).join(", "), preserveAspectRatio: "none" },
  svg("line", { x1: 0, x2: values.length * 12, y1: 52, y2: 52, class: "axis" }),
  values.map((x, i) => svg("rect", {
    x: i * 12 + 2, width: 8, y: x > 0 ? 52 - size(x) : 52, height: size(x), class: x > 0 ? "up" : "down",
  })));
}

/** The end of an axis that holds all values but the few that lie far outside. */
export function axisEnd(values, least) {
  const sorted = [...values].sort((a, b) => a - b), most = sorted[Math.floor(0.9 * (sorted.length - 1))] ?? 0;
  return Math.max(least, Math.min(sorted.at(-1) ?? 0, 1.5 * most));
}

/**
 * A curve over steps: points [[step, value]], dots for single measurements, and those of the run before as a ghost.
 * marks: steps with a line down the picture. What lies above the axis has a triangle at its upper edge.
 */
export function curve(title, points, { steps, max, min = 0, dots = [], marks = [], ghost = {}, show = number }) {
  const x = (step) => 4 + (step / steps) * 292, y = (value) => 94 - (Math.min(max, Math.max(min, value)) - min) / (max - min) * 88;
  const line = (list, kind) => (list.length ? svg("polyline", { points: list.map(([s, v]) => `${x(s)},${y(v)}`).join(" "), class: kind }) : null);
  const last = points.at(-1), above = points.filter(([, v]) => v > max), highest = Math.max(...above.map(([, v]) => v));
  const told = above.length ? `▲ ${text("curve_above", { value: show(highest) })}` : "";
  return h("figure", {},
    h("figcaption", {}, title, " ", h("b", {}, last ? show(last[1]) : "–")),
    svg("svg", { viewBox: "0 0 300 100", class: "curve", role: "img", "aria-label": `${title} ${last ? show(last[1]) : ""} ${told}` },
      svg("line", { x1: 4, x2: 296, y1: y(min < 0 ? 0 : min), y2: y(min < 0 ? 0 : min), class: "axis" }),
      line(ghost.points ?? [], "ghost"),
      (ghost.dots ?? []).map(([s, v]) => svg("circle", { cx: x(s), cy: y(v), r: 3, class: "ghost" })),
      line(points, "run"),
      dots.map(([s, v]) => svg("circle", { cx: x(s), cy: y(v), r: 3.5 }, svg("title", {}, `${s}: ${show(v)}`))),
      above.map(([s, v]) => svg("polygon", { points: `${x(s)},1 ${x(s) - 4},8 ${x(s) + 4},8`, class: "above" }, svg("title", {}, `${s}: ${show(v)}`))),
      marks.map((step) => svg("line", { x1: x(step), x2: x(step), y1: 4, y2: 94, class: "mark" })),
      svg("text", { x: 296, y: 16, "text-anchor": "end" }, show(max)),
      svg("text", { x: 296, y: 90, "text-anchor": "end" }, text("curve_end", { steps })),
      above.length ? svg("text", { x: 6, y: 16 }, told) : null));
}

/** A formula with its numbers, in lines of plain text. */
export const formula = (...lines) => h("div", { class: "formula" }, lines.map((line) => h("p", {}, line)));

export const quiet = (key, values) => h("p", { class: "quiet" }, text(key, values));
