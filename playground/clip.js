// Room 3: the clip of chapter 3 and what it is for, and the group's advantages of chapters 4 and 5.

import { frame, numbers, oneOf, range, remember, starts, whole } from "./address.js";
import { text } from "./texts.js";
import { bars, button, check, formula, h, number, quiet, signed, slider, svg } from "./dom.js";
import { fields as ofGae, gaeFigure as drawGae } from "./gae.js";
import { clippedObjective, groupAdvantage } from "./grpo.js";

/** Which part of the room a mission is about. */
export const PART_OF = { edge: "clip", lucky: "passes", pull: "passes", equal: "group", critic: "gae" };

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

export const fields = {
  ratio: range(1.35, 0, 2), A: range(1, -2, 2), epsilon: range(0.2, 0.05, 0.5),
  clip: oneOf("on", ["on", "off"]), beta: range(0, 0, 3), lucky: range(3, 0, 3), passes: whole(20, 1, 40),
  rewards: numbers([4, 5.5, 9.5, 5.5, 5.5, 0, 0, 0], 0, 9.5, 8), ...ofGae,
};
export const settings = starts(fields);

// A made-up world of three actions: what each is worth, how often it was taken, and what that brought.
const WORTH = [1, 0.6, 0.2], OLD = [0.6, 0.3, 0.1];
const BATCH = [[0, 0.9], [0, 1.1], [0, 0.7], [0, 1.2], [0, 0.8], [1, 0.5], [1, 0.6], [2, null]];

/**
 * Updates on one batch, over and over: gradient ascent on mean min(ratio A, clip(ratio) A) − β KL(π, π_old).
 *
 * Of each pass: the policy, what the batch promises (mean ratio · A), what the policy is really worth more, and how
 * many answers of each action still push, that is, have a gradient other than 0.
 */
export function passesOver({ clip, epsilon, beta, lucky, passes }) {
  const batch = BATCH.map(([action, reward]) => ({ action, reward: reward ?? lucky }));
  const average = mean(batch.map(({ reward }) => reward)), seen = [];
  const logits = OLD.map(Math.log);
  for (let pass = 0; pass <= passes; pass++) {
    const sizes = logits.map(Math.exp), total = sizes.reduce((a, b) => a + b, 0), policy = sizes.map((x) => x / total);
    const ratios = policy.map((p, a) => p / OLD[a]);
    const kl = policy.reduce((sum, p, a) => sum + p * Math.log(ratios[a]), 0);
    const slopes = batch.map(({ action, reward }) =>
      clippedObjective(ratios[action], reward - average, clip === "on" ? epsilon : Infinity).slope);
    const pushes = ({ action }, i) => (Math.abs(slopes[i]) > 1e-9 ? action : null);
    const pushing = OLD.map((_, a) => batch.filter((answer, i) => pushes(answer, i) === a).length);
    seen.push({
      policy, ratios, kl, pushing, promised: mean(batch.map(({ action, reward }) => ratios[action] * (reward - average))),
      worth: policy.reduce((sum, p, a) => sum + (p - OLD[a]) * WORTH[a], 0),
    });
    const slope = policy.map((p, a) => -beta * p * (Math.log(ratios[a]) - kl));
    batch.forEach(({ action }, i) => {
      const weight = slopes[i] * ratios[action] / batch.length;
      policy.forEach((p, a) => { slope[a] += weight * ((a === action ? 1 : 0) - p); });
    });
    slope.forEach((x, a) => { logits[a] += x; });
  }
  return seen;
}

/** The numbers in the explanations of the two missions about this batch. */
export function passesTold() {
  const given = { epsilon: 0.2, beta: 0, lucky: 3, passes: 20 };
  const free = passesOver({ ...given, clip: "off" }), held = passesOver({ ...given, clip: "on" });
  const pulled = passesOver({ ...given, clip: "off", beta: 1 });
  const end = (seen) => seen.at(-1), percent = (seen) => number(100 * end(seen).policy[2], 0);
  return {
    promised: number(end(free).promised), lost: number(-end(free).worth), free: percent(free),
    first: number(held[1].ratios[2]), ratio: number(end(held).ratios[2]), held: percent(held),
    held_lost: number(-end(held).worth), pulled: percent(pulled), pulled_lost: number(-end(pulled).worth),
  };
}

function objectivePicture({ ratio, A: advantage, epsilon }) {
  const x = (r) => 4 + (r / 2) * 292, y = (value) => 75 - value * (34 / Math.max(1, Math.abs(advantage)));
  const ratios = Array.from({ length: 101 }, (_, i) => i / 50);
  const path = (f) => ratios.map((r, i) => `${i ? "L" : "M"}${x(r)},${y(f(r))}`).join("");
  return svg("svg", { viewBox: "0 0 300 150", class: "curve", role: "img", "aria-label": text("clip_picture"), id: "clip_picture" },
    svg("line", { x1: 4, x2: 296, y1: 75, y2: 75, class: "axis" }),
    [1 - epsilon, 1, 1 + epsilon].map((r) => svg("line", { x1: x(r), x2: x(r), y1: 6, y2: 144, class: "axis" })),
    [[1 - epsilon, "1−ε", "end"], [1 + epsilon, "1+ε", "start"]].map(([r, name, anchor]) =>
      svg("text", { x: x(r) + (anchor === "end" ? -3 : 3), y: 12, "text-anchor": anchor }, name)),
    svg("path", { d: path((r) => r * advantage), class: "second" }),
    svg("path", { d: path((r) => clippedObjective(r, advantage, epsilon).value) }),
    svg("circle", { cx: x(ratio), cy: y(clippedObjective(ratio, advantage, epsilon).value), r: 5 }));
}

export function clipFigure(place) {
  const picture = h("div"), sum = h("div", { id: "clip_formula", "aria-live": "polite" });

  function show() {
    remember();
    const { ratio, A, epsilon } = settings, { value, slope } = clippedObjective(ratio, A, epsilon);
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

  const turned = (key) => (value) => { settings[key] = value; show(); };
  place.append(h("div", { class: "two" }, picture,
    h("div", {},
      h("div", { class: "sliders" },
        slider("ratio", "ratio = π / π_old", { min: 0, max: 2, step: 0.01, value: settings.ratio, show: (x) => number(x), change: turned("ratio") }),
        slider("A", text("advantage_A"), { min: -2, max: 2, step: 0.1, value: settings.A, show: (x) => number(x, 1), change: turned("A") }),
        slider("clip_epsilon", text("clip_epsilon"), { min: 0.05, max: 0.5, step: 0.01, value: settings.epsilon, show: (x) => number(x), change: turned("epsilon") })),
      sum)));
  show();
}

/** Twenty updates on one batch: what it promises and what that is worth, with and without the clip. */
export function passesFigure(place) {
  const picture = h("div"), told = h("p", { class: "notice", id: "passes_told", "aria-live": "polite" }), table = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": text("passes_title") });

  function show() {
    remember();
    const seen = passesOver(settings), last = seen.at(-1), { passes } = settings;
    const values = seen.flatMap(({ promised, worth }) => [promised, worth]);
    const low = Math.min(-0.2, ...values), high = Math.max(0.4, ...values);
    const x = (pass) => 4 + (pass / passes) * 292, y = (value) => 144 - ((value - low) / (high - low)) * 136;
    const line = (name, kind) => svg("polyline", { points: seen.map((row, pass) => `${x(pass)},${y(row[name])}`).join(" "), class: kind });
    picture.replaceChildren(
      h("p", { class: "legend" }, h("span", { class: "second" }, `${text("passes_promised")}: ${signed(last.promised)}`), " ",
        h("span", { class: "run" }, `${text("passes_worth")}: ${signed(last.worth)}`)),
      svg("svg", { viewBox: "0 0 300 150", class: "curve", role: "img", id: "passes_picture", "aria-label": text("passes_picture") },
        svg("line", { x1: 4, x2: 296, y1: y(0), y2: y(0), class: "axis" }),
        svg("text", { x: 6, y: y(0) + 12 }, "0"), svg("text", { x: 294, y: y(0) - 3, "text-anchor": "end" }, text("passes_axis", { passes })),
        line("promised", "second"), line("worth", "run")));
    const values3 = (list) => list.map((value) => h("td", { class: "number" }, number(value)));
    table.replaceChildren(h("table", {},
      h("tr", {}, h("th", {}, text("passes_action")), ["A", "B", "C"].map((name) => h("th", { class: "number" }, name))),
      h("tr", {}, h("td", {}, text("passes_true")), values3(WORTH)),
      h("tr", {}, h("td", {}, text("passes_batch")), [5, 2, 1].map((count, a) => h("td", { class: "number" },
        `${count} × ${number(mean(BATCH.filter(([action]) => action === a).map(([, reward]) => reward ?? settings.lucky)))}`))),
      h("tr", {}, h("td", {}, "π_old"), values3(OLD)),
      h("tr", {}, h("td", {}, text("passes_now", { passes })), values3(last.policy)),
      h("tr", {}, h("td", {}, "ratio"), values3(last.ratios)),
      h("tr", { id: "passes_pushing" }, h("td", {}, text("passes_pushing")), last.pushing.map((count, a) =>
        h("td", { class: "number" }, `${count} / ${BATCH.filter(([action]) => action === a).length}`)))));
    const edge = 1 + settings.epsilon, ends = { edge: number(edge), ratio: number(last.ratios[2]) };
    const held = last.pushing[2] === 0 && last.ratios[2] > edge && settings.clip === "on";
    told.textContent = text(last.worth < -0.05 ? "passes_lost" : last.worth > 0.005 ? "passes_gained" : "passes_same",
      { promised: signed(last.promised), worth: signed(last.worth), kl: number(last.kl) })
      + (held ? text("between") + text("passes_held", ends) : "");
  }

  const turned = (key) => (value) => { settings[key] = value; show(); };
  place.append(h("div", { class: "two" }, picture, h("div", {},
    h("div", { class: "controls" }, check("clip_on", text("passes_clip"), settings.clip === "on", (on) => turned("clip")(on ? "on" : "off"))),
    h("div", { class: "sliders" },
      slider("lucky", text("passes_lucky"), { min: 0, max: 3, step: 0.1, value: settings.lucky, show: (x) => number(x, 1), change: turned("lucky") }),
      slider("passes", text("passes"), { min: 1, max: 40, step: 1, value: settings.passes, change: turned("passes") }),
      slider("passes_beta", text("passes_beta"), { min: 0, max: 3, step: 0.1, value: settings.beta, show: (x) => number(x), change: turned("beta") })),
    table)), told);
  show();
}

/** A group's rewards, and the advantages that four algorithms make of them. */
export function groupFigure(place) {
  const methods = h("div", { class: "methods", id: "methods" }), told = h("p", { class: "notice", id: "group_told" });
  const eight = h("div", { class: "eight" });

  function show() {
    remember();
    const { rewards } = settings;
    const all = ADVANTAGES.map(([, , advantages]) => advantages(rewards));
    const limit = Math.max(1e-9, ...all.flat().map(Math.abs));
    methods.replaceChildren(...ADVANTAGES.map(([name, rule], m) => h("div", { class: "card", "data-method": name },
      h("p", {}, h("strong", {}, name)), h("p", { class: "quiet" }, `A = ${name === "RLOO" ? text("rloo_rule") : rule}`), bars(all[m], limit),
      h("p", { class: "values" }, all[m].map((value) => signed(value)).join("  ")))));
    const same = Math.max(...rewards) === Math.min(...rewards);
    const std = Math.sqrt(rewards.reduce((sum, r) => sum + (r - mean(rewards)) ** 2, 0) / (rewards.length - 1));
    told.textContent = same ? text("group_same") : text("group_told", { mean: number(mean(rewards)), std: number(std) });
  }

  function handles() {
    eight.replaceChildren(...settings.rewards.map((reward, i) => {
      const shown = h("span", {}, number(reward, 1));
      return h("label", {}, h("input", {
        type: "range", orient: "vertical", min: 0, max: 9.5, step: 0.5, value: reward, "aria-label": text("reward_of", { i: i + 1 }),
        oninput: ({ target }) => {
          settings.rewards = settings.rewards.with(i, Number(target.value));
          shown.textContent = number(settings.rewards[i], 1);
          show();
        },
      }), h("br"), shown);
    }));
    show();
  }
  const preset = (name, rewards) => button(text(name), () => { settings.rewards = rewards; handles(); });
  place.append(
    h("div", { class: "controls" },
      preset("group_chapter", fields.rewards.start), preset("group_one", [1, 0, 0, 0, 0, 0, 0, 0]),
      preset("group_most", [1, 1, 1, 1, 1, 1, 1, 0]), preset("group_equal", [4, 4, 4, 4, 4, 4, 4, 4])),
    eight, told, methods, quiet("methods_about"));
  handles();
}

export const gaeFigure = (place) => drawGae(place, settings);

/** The four parts. On a phone, one is open at first: the first, or the one that a mission is about. */
export function clipRoom(place) {
  const narrow = matchMedia("(max-width: 52rem)").matches;
  const parts = [["clip", clipFigure], ["passes", passesFigure], ["group", groupFigure], ["gae", gaeFigure]];
  const about = PART_OF[frame.mission] ?? "clip";
  place.append(...parts.map(([name, draw]) => {
    const inside = h("div", {}, h("p", {}, text(`${name}_about`)));
    draw(inside);
    return h("details", { class: "part", id: `${name}_part`, open: narrow && name !== about ? undefined : "" },
      h("summary", {}, h("h2", { id: `${name}_title` }, text(`${name}_title`))), inside);
  }));
}
