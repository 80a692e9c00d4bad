// Room 2: the clipped objective of chapter 3, and the group's advantages of chapters 4 and 5.

import { text } from "./texts.js";
import { bars, formula, h, button, number, quiet, signed, slider, svg } from "./dom.js";
import { clippedObjective, groupAdvantage } from "./grpo.js";

const mean = (list) => list.reduce((a, b) => a + b, 0) / list.length;

/** Four ways to turn a group's rewards into advantages; each is [name, formula, function]. */
export const ADVANTAGES = [
  ["GRPO", "(R − mean) / std", groupAdvantage],
  ["Dr. GRPO", "R − mean", (rewards) => rewards.map((r) => r - mean(rewards))],
  ["RLOO", "R − mean of the others", (rewards) =>
    rewards.map((r, i) => r - mean(rewards.filter((_, j) => j !== i)))],
  ["MaxRL", "(R − mean) / mean", (rewards) =>
    rewards.map((r) => (mean(rewards) > 0 ? (r - mean(rewards)) / mean(rewards) : 0))],
];

const settings = { ratio: 1.35, advantage: 1, epsilon: 0.2, rewards: [4, 5.5, 9.5, 5.5, 5.5, 0, 0, 0] };

function objectivePicture({ ratio, advantage, epsilon }) {
  const x = (r) => 4 + (r / 2) * 292, y = (value) => 75 - value * (34 / Math.max(1, Math.abs(advantage)));
  const ratios = Array.from({ length: 101 }, (_, i) => i / 50);
  const path = (f) => ratios.map((r, i) => `${i ? "L" : "M"}${x(r)},${y(f(r))}`).join("");
  return svg("svg", { viewBox: "0 0 300 150", class: "curve", role: "img", "aria-label": text("clip_picture"), id: "clip_picture" },
    svg("line", { x1: 4, x2: 296, y1: 75, y2: 75, class: "axis" }),
    [1 - epsilon, 1, 1 + epsilon].map((r) => svg("line", { x1: x(r), x2: x(r), y1: 6, y2: 144, class: "axis" })),
    [[1 - epsilon, "1−ε"], [1 + epsilon, "1+ε"]].map(([r, name]) => svg("text", { x: x(r) - 8, y: 12 }, name)),
    svg("path", { d: path((r) => r * advantage), class: "second" }),
    svg("path", { d: path((r) => clippedObjective(r, advantage, epsilon).value) }),
    svg("circle", { cx: x(ratio), cy: y(clippedObjective(ratio, advantage, epsilon).value), r: 5 }));
}

export function clipRoom(place) {
  const picture = h("div"), sum = h("div", { id: "clip_formula", "aria-live": "polite" });
  const methods = h("div", { class: "methods", id: "methods" }), told = h("p", { class: "notice", id: "group_told" });

  function showClip() {
    const { ratio, advantage: A, epsilon } = settings, { value, slope } = clippedObjective(ratio, A, epsilon);
    const clipped = Math.min(1 + epsilon, Math.max(1 - epsilon, ratio));
    picture.replaceChildren(objectivePicture(settings));
    sum.replaceChildren(formula(
      `ratio · A = ${number(ratio)} · ${number(A)} = ${number(ratio * A)}`,
      `clip(ratio, ${number(1 - epsilon)}, ${number(1 + epsilon)}) · A = ${number(clipped)} · ${number(A)} = ${number(clipped * A)}`,
      `min = ${number(value)}`,
      `d min / d ratio = ${number(slope)}`,
      text(A === 0 ? "clip_zero" : slope === 0 ? "clip_holds" : A > 0 ? "clip_up" : "clip_down"),
    ));
  }

  function showGroup() {
    const { rewards } = settings;
    const all = ADVANTAGES.map(([, , advantages]) => advantages(rewards));
    const limit = Math.max(1e-9, ...all.flat().map(Math.abs));
    methods.replaceChildren(...ADVANTAGES.map(([name, rule], m) => {
      const values = all[m];
      return h("div", { class: "card", "data-method": name },
        h("h3", {}, h("span", {}, name)), h("p", { class: "quiet" }, `A = ${name === "RLOO" ? text("rloo_rule") : rule}`), bars(values, limit),
        h("p", { class: "values" }, values.map((value) => signed(value)).join("  ")));
    }));
    const same = Math.max(...rewards) === Math.min(...rewards);
    const std = Math.sqrt(rewards.reduce((sum, r) => sum + (r - mean(rewards)) ** 2, 0) / (rewards.length - 1));
    told.textContent = same ? text("group_same") : text("group_told", { mean: number(mean(rewards)), std: number(std) });
  }

  const turn = (key) => (value) => { settings[key] = value; showClip(); };
  const eight = h("div", { class: "eight" });
  function handles() {
    eight.replaceChildren(...settings.rewards.map((reward, i) => {
      const shown = h("span", {}, number(reward, 1));
      return h("label", {}, h("input", {
        type: "range", orient: "vertical", min: 0, max: 9.5, step: 0.5, value: reward, "aria-label": text("reward_of", { i: i + 1 }),
        oninput: ({ target }) => { settings.rewards[i] = Number(target.value); shown.textContent = number(settings.rewards[i], 1); showGroup(); },
      }), h("br"), shown);
    }));
    showGroup();
  }
  const preset = (name, rewards) => button(text(name), () => { settings.rewards = [...rewards]; handles(); });

  place.append(
    h("h2", {}, text("clip_title")), h("p", {}, text("clip_about")),
    h("div", { class: "two" }, picture,
      h("div", {},
        h("div", { class: "sliders" },
          slider("ratio", "ratio = π / π_old", { min: 0, max: 2, step: 0.01, value: settings.ratio, show: (x) => number(x), change: turn("ratio") }),
          slider("A", text("advantage_A"), { min: -2, max: 2, step: 0.1, value: settings.advantage, show: (x) => number(x, 1), change: turn("advantage") }),
          slider("clip_epsilon", text("clip_epsilon"), { min: 0.05, max: 0.5, step: 0.01, value: settings.epsilon, show: (x) => number(x), change: turn("epsilon") })),
        sum)),
    h("h2", {}, text("group_title")), h("p", {}, text("group_about")),
    h("div", { class: "controls" },
      preset("group_chapter", [4, 5.5, 9.5, 5.5, 5.5, 0, 0, 0]), preset("group_one", [1, 0, 0, 0, 0, 0, 0, 0]),
      preset("group_most", [1, 1, 1, 1, 1, 1, 1, 0]), preset("group_equal", [4, 4, 4, 4, 4, 4, 4, 4])),
    eight, told, methods, quiet("methods_about"));
  showClip();
  handles();
}
