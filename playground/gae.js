// GAE on the episode of eight steps of chapter 3: how much each later TD error counts.

import { range, remember, whole } from "./address.js";
import { text } from "./texts.js";
import { button, formula, h, number, signed, slider, svg } from "./dom.js";

const REWARDS = [0, 1, 0, 1, 0, 1, 0, 5], PROMISES = [6, 5, 6, 7, 6, 4, 2, 3];

export const fields = {
  lambda: range(0.5, 0, 1), gamma: range(1, 0.5, 1), step: whole(1, 1, 8),
  v2: whole(PROMISES[1], 0, 10), r8: whole(REWARDS[7], -5, 10),
};

/** TD errors of an episode that ends by termination, and the advantages (Schulman et al. 2016, eq. 16). */
export function gae(rewards, values, gamma, lambda) {
  const deltas = rewards.map((reward, t) => reward + gamma * (values[t + 1] ?? 0) - values[t]), advantages = [];
  for (let t = rewards.length - 1; t >= 0; t--) advantages[t] = deltas[t] + gamma * lambda * (advantages[t + 1] ?? 0);
  return { deltas, advantages };
}

/** What the mission about a wrong critic says of step 1: how much too high its advantage is with lambda = 0. */
export function criticTold() {
  const high = (lambda) => {
    const of = (v2) => gae(REWARDS, PROMISES.with(1, v2), 1, lambda).advantages[0];
    return number(Math.abs(of(10) - of(PROMISES[1])), 0);
  };
  return { v2: PROMISES[1], high: high(0), left: high(1) };
}

export function gaeFigure(place, settings) {
  const picture = h("div"), sum = h("div", { id: "gae_formula" });
  const steps = REWARDS.map((_, t) => button(String(t + 1), () => { settings.step = t + 1; show(); },
    { id: `gae_step_${t + 1}`, "aria-label": text("gae_step", { step: t + 1 }) }));

  function show() {
    remember();
    const { lambda, gamma, step, v2, r8 } = settings;
    const rewards = REWARDS.with(7, r8), values = PROMISES.with(1, v2);
    const { deltas, advantages } = gae(rewards, values, gamma, lambda), from = step - 1;
    const shares = deltas.map((delta, t) => (t < from ? 0 : delta * (gamma * lambda) ** (t - from)));
    const most = Math.max(3, ...deltas.map(Math.abs)), size = (x) => (Math.abs(x) / most) * 42;
    steps.forEach((element, t) => element.setAttribute("aria-pressed", String(t === from)));
    const bar = (t, x, kind) => svg("rect", { x: t * 46 + 12, width: 26, y: x > 0 ? 110 - size(x) : 110, height: size(x), class: kind });
    picture.replaceChildren(svg("svg", { viewBox: "0 0 368 176", class: "curve gae", role: "img", id: "gae_picture",
      "aria-label": shares.map((x, t) => `${t + 1}: ${signed(x, 3)}`).join(", ") },
    svg("line", { x1: 4, x2: 364, y1: 110, y2: 110, class: "axis" }),
    deltas.map((delta, t) => [
      [`r ${number(rewards[t], 0)}`, `V ${number(values[t], 0)}`, `δ ${signed(delta, 1)}`].map((line, i) =>
        svg("text", { x: t * 46 + 25, y: 14 + 15 * i, "text-anchor": "middle" }, line)),
      bar(t, delta, "whole"), bar(t, shares[t], shares[t] > 0 ? "up" : "down"),
      svg("text", { x: t * 46 + 25, y: 170, "text-anchor": "middle", class: t < from ? "" : "best" }, t < from ? "–" : signed(shares[t])),
    ])));
    const counted = shares.slice(from).map((x) => signed(x).replace(/^0/, "+0")).join(" ");
    sum.replaceChildren(formula(
      "A(t) = δ(t) + γλ · A(t + 1)",
      `A(${step}) = ${counted} = ${signed(advantages[from], 3)}`,
      text(lambda === 0 ? "gae_zero" : lambda === 1 ? "gae_one" : "gae_between", { share: number(gamma * lambda) }),
    ));
  }

  const turned = (name) => (x) => { settings[name] = x; show(); };
  place.append(
    h("div", { class: "two" }, h("div", {}, picture, h("div", { class: "controls steps", role: "group", "aria-label": text("gae_steps") }, h("span", {}, text("gae_of")), steps)),
      h("div", {}, h("div", { class: "sliders" },
        slider("lambda", text("lambda"), { min: 0, max: 1, step: 0.05, value: settings.lambda, show: (x) => number(x), change: turned("lambda") }),
        slider("gae_gamma", text("gamma"), { min: 0.5, max: 1, step: 0.05, value: settings.gamma, show: (x) => number(x), change: turned("gamma") }),
        slider("v2", text("gae_v2"), { min: 0, max: 10, step: 1, value: settings.v2, change: turned("v2") }),
        slider("r8", text("gae_r8"), { min: -5, max: 10, step: 1, value: settings.r8, change: turned("r8") })),
      sum)));
  show();
}
