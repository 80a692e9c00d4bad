// Room 2: REINFORCE on three actions, a three-armed bandit (chapter 3). What a baseline does to the noise of one
// step's gradient, and what that noise does to training.

import { range, remember, starts, whole } from "./address.js";
import { text } from "./texts.js";
import { button, curve, formula, h, number, quiet, slider, svg } from "./dom.js";
import { draw, random } from "./grpo.js";

const WORTH = [3, 2, 1], NOISE = 1; // mean rewards of A, B and C; standard deviation of each
const BATCHES = 200, RUNS = 20, STEPS = 100;
const KEEP = 0.9; // how much of the running mean stays at each step
export const BASELINES = ["none", "group", "running"];

export const fields = {
  shift: whole(0, 0, 20), samples: whole(8, 1, 64), start: range(0.2, 0.05, 0.9),
  rate: range(0.5, 0.05, 1), seed: whole(0, 0, 999),
};
export const settings = starts(fields);

const total = (list) => list.reduce((a, b) => a + b, 0), mean = (list) => total(list) / list.length;
const squared = (vector) => total(vector.map((x) => x * x));
const softmax = (logits) => {
  const sizes = logits.map((x) => Math.exp(x - Math.max(...logits)));
  return sizes.map((x) => x / total(sizes));
};
const startOf = (start) => [start, (1 - start) / 2, (1 - start) / 2];

/** `samples` actions by the policy, and what each pays: [{ action, reward }]. The draws don't depend on `shift`. */
export function sampleBatch(policy, { samples, shift }, next) {
  return Array.from({ length: samples }, () => {
    const action = draw(policy, next());
    const normal = Math.sqrt(-2 * Math.log(1 - next())) * Math.cos(2 * Math.PI * next()); // Box-Muller
    return { action, reward: WORTH[action] + shift + NOISE * normal };
  });
}
const meanReward = (batch) => mean(batch.map(({ reward }) => reward));

/** REINFORCE: mean of (r − b) ∇ log π(action), by the logits; ∇ log π(action) = onehot(action) − π. */
export const estimate = (policy, batch, b) =>
  policy.map((p, k) => mean(batch.map(({ action, reward }) => (reward - b) * ((action === k ? 1 : 0) - p))));

/** The baseline of a batch; `running`: the mean of earlier batches. */
const baselineOf = (kind, batch, running) => ({ none: 0, group: meanReward(batch), running })[kind];

/**
 * What `estimate` is on average, and its variance: E|ĝ − E ĝ|², the trace of the covariance.
 *
 * With a fixed b, the N samples are independent: (E[(r − b)²|s|²] − |g|²) / N, with s = ∇ log π. The group's
 * mean depends on all N. There ĝ is (N − 1) / N times the sample covariance of r and s, whose variance is
 * (E[(r − μ)²|s|²] − |g|² (N − 2) / (N − 1) + Var r · E|s|² / (N − 1)) / N.
 */
export function closedForm(policy, { samples: N, shift }, kind, running) {
  const worth = WORTH.map((x) => x + shift), average = total(policy.map((p, a) => p * worth[a]));
  const gradient = policy.map((p, a) => p * (worth[a] - average)); // ∂ Σ π(a) worth(a) / ∂ logit
  const score = policy.map((p) => 1 - 2 * p + squared(policy)); // |s|² of each action
  const spread = (b) => total(policy.map((p, a) => p * ((worth[a] - b) ** 2 + NOISE ** 2) * score[a]));
  if (kind !== "group") {
    const b = kind === "running" ? running : 0;
    return { gradient, average: gradient, variance: (spread(b) - squared(gradient)) / N };
  }
  const ofReward = total(policy.map((p, a) => p * ((worth[a] - average) ** 2 + NOISE ** 2)));
  const ofScore = total(policy.map((p, a) => p * score[a]));
  const sum = (N - 1) * spread(average) - (N - 2) * squared(gradient) + ofReward * ofScore;
  return { gradient, average: gradient.map((x) => (x * (N - 1)) / N), variance: ((N - 1) / N ** 3) * sum };
}

/** Estimates of one step's gradient, each from a batch of its own: { none, group, running: [BATCHES][3], b }. */
export function estimatesOf(given) {
  const policy = startOf(given.start);
  const b = meanReward(sampleBatch(policy, given, random(given.seed, BATCHES))); // of the batch before
  const batches = Array.from({ length: BATCHES }, (_, i) => sampleBatch(policy, given, random(given.seed, i)));
  return { b, ...Object.fromEntries(BASELINES.map((kind) =>
    [kind, batches.map((batch) => estimate(policy, batch, baselineOf(kind, batch, b)))])) };
}

/** Mean squared distance from their mean (n − 1). */
export function varianceOf(estimates) {
  const middle = [0, 1, 2].map((k) => mean(estimates.map((x) => x[k])));
  return total(estimates.map((x) => squared(x.map((v, k) => v - middle[k])))) / (estimates.length - 1);
}

/** π(A) along a training by gradient ascent, from one batch that's only looked at: [STEPS + 1]. */
export function trainOnce(kind, given, seed) {
  const next = random(given.seed, BATCHES + 1, seed), logits = startOf(given.start).map(Math.log);
  let policy = softmax(logits), running = meanReward(sampleBatch(policy, given, next));
  const seen = [policy[0]];
  for (let step = 0; step < STEPS; step++) {
    const batch = sampleBatch(policy, given, next);
    estimate(policy, batch, baselineOf(kind, batch, running)).forEach((x, k) => { logits[k] += given.rate * x; });
    running = KEEP * running + (1 - KEEP) * meanReward(batch);
    policy = softmax(logits);
    seen.push(policy[0]);
  }
  return seen;
}
const trainAll = (kind, given) => Array.from({ length: RUNS }, (_, seed) => trainOnce(kind, given, seed));
const countOf = (runs, end) => runs.filter((seen) => end(seen.at(-1))).length;
const percent = (share) => number(100 * share, 1).replace(".0", "");
const found = (p) => p > 0.9, lost = (p) => p < 0.1;

/** The numbers in the explanations of the missions. */
export function banditTold() {
  const given = starts(fields), policy = startOf(given.start), { b } = estimatesOf(given);
  const of = (kind, change) => closedForm(policy, { ...given, ...change }, kind, b + (change.shift ?? 0));
  const before = of("none", {}).variance, after = of("none", { shift: 10 }).variance;
  const held = of("running", { shift: 10 }).variance;
  const [runs, small, steady] = [["none", {}], ["none", { rate: 0.1 }], ["running", {}]].map(([kind, change]) =>
    trainAll(kind, { ...given, shift: 10, ...change }));
  const end = (seen) => number(mean(seen.map((run) => run.at(-1))));
  return {
    before: number(before), after: number(after), times: number(after / before, 0), runs: RUNS, steps: STEPS,
    lost: countOf(runs, lost), held: number(held), needed: Math.ceil((given.samples * after) / held),
    many: number(of("none", { shift: 10, samples: 64 }).variance), two: percent(1 - 1 / 2), eight: percent(1 - 1 / 8),
    lost_small: countOf(small, lost), end: end(runs), end_small: end(small), end_held: end(steady), rate: given.rate,
  };
}

// The three components of an estimate sum to 0, so a plane shows all of it, with its lengths: A is up.
const inPlane = ([a, b, c]) => [(c - b) / Math.SQRT2, (2 * a - b - c) / Math.sqrt(6)];
const WIDTH = 146, HEIGHT = 78; // from the middle of the picture to its edges

/** The estimates as dots around the exact gradient; those outside are triangles at the edge. */
function dots(kind, estimates, exact, radius) {
  const x = (point) => (point[0] / radius) * HEIGHT, y = (point) => (-point[1] / radius) * HEIGHT;
  const place = (vector) => [x(inPlane(vector)), y(inPlane(vector))], at = (value) => value.toFixed(2);
  const beyond = ([u, v]) => Math.max(Math.abs(u) / WIDTH, Math.abs(v) / HEIGHT);
  const points = estimates.map(place), outside = points.filter((point) => beyond(point) > 1);
  const [gx, gy] = place(exact.gradient), [mx, my] = [0, 1].map((i) => mean(points.map((point) => point[i])));
  const arms = ["A", "B", "C"].map((name, action) => [name, place([0, 1, 2].map((k) => (k === action ? radius : 0)))]);
  const picture = svg("svg", { viewBox: "-150 -82 300 164", class: "curve dots", role: "img", id: `dots_${kind}`,
    "aria-label": text("dots_picture", { count: BATCHES, outside: outside.length }) },
  arms.map(([, [u, v]]) => svg("line", { x1: 0, y1: 0, x2: u, y2: v, class: "axis" })),
  points.filter((point) => beyond(point) <= 1).map(([u, v]) =>
    svg("circle", { cx: at(u), cy: at(v), r: 2.5, class: "dot" })),
  outside.map((point) => {
    const [u, v] = point.map((value) => value / beyond(point)), turn = (Math.atan2(v, u) * 180) / Math.PI;
    const transform = `translate(${at(u)} ${at(v)}) rotate(${turn.toFixed(0)})`;
    return svg("polygon", { points: "4,0 -4,-4 -4,4", transform, class: "above" });
  }),
  svg("path", { d: `M${at(gx - 7)},${at(gy)}h14M${at(gx)},${at(gy - 7)}v14`, class: "exact" }),
  beyond([mx, my]) <= 1 ? svg("circle", { cx: at(mx), cy: at(my), r: 6, class: "middle" }) : null,
  arms.map(([name, [u, v]]) => svg("text", { x: u * 1.12, y: v * 1.12 + 4, "text-anchor": "middle" }, `${name} ↑`)));
  return { picture, outside: outside.length };
}

/** Many runs as thin lines, and their mean. */
function runsPicture(kind, runs) {
  const average = runs[0].map((_, step) => mean(runs.map((seen) => seen[step])));
  const figure = curve(text("bandit_curve"), average.map((p, step) => [step, p]), { steps: STEPS, max: 1 });
  const line = (seen) => svg("polyline", { class: "thin",
    points: seen.map((p, step) => `${(4 + (step / STEPS) * 292).toFixed(1)},${(94 - p * 88).toFixed(1)}`).join(" ") });
  figure.querySelector("polyline").before(...runs.map(line));
  figure.id = `runs_${kind}`;
  return figure;
}

/** `alone`: as a figure in a page, without the training. */
export function banditRoom(place, alone = false) {
  const cards = h("div", { class: "three" });
  const told = h("p", { class: "notice", id: "bandit_told", "aria-live": "polite" });
  const learned = alone ? null : h("p", { class: "notice", id: "bandit_learned", "aria-live": "polite" });

  function show() {
    remember();
    const policy = startOf(settings.start), plain = { ...settings, shift: 0 };
    const now = estimatesOf(settings), before = estimatesOf(plain);
    const exact = Object.fromEntries(BASELINES.map((kind) => [kind, closedForm(policy, settings, kind, now.b)]));
    const size = Math.sqrt(squared(exact.none.gradient));
    // What the picture holds doesn't depend on the constant: what it does to the noise is to be seen.
    const radius = Math.max(1.3 * size, 3 * Math.sqrt(closedForm(policy, plain, "none").variance / 2));
    const runs = alone ? null : Object.fromEntries(BASELINES.map((kind) => [kind, trainAll(kind, settings)]));
    cards.replaceChildren(...BASELINES.map((kind) => {
      const { picture, outside } = dots(kind, now[kind], exact[kind], radius);
      const rule = text(`bandit_${kind}_rule`, { b: number(now.b) });
      const variances = { variance: number(varianceOf(now[kind]), 3), exact: number(exact[kind].variance, 3) };
      const share = percent(Math.sqrt(squared(exact[kind].average)) / size);
      return h("section", { class: "card", "data-baseline": kind },
        h("h3", {}, text(`bandit_${kind}`), h("span", { class: "quiet" }, rule)),
        picture,
        formula(text("bandit_variance", variances), text("bandit_center", { share, outside })),
        alone ? "" : runsPicture(kind, runs[kind]));
    }));
    const ratio = (seen) => number(varianceOf(seen.none) / varianceOf(seen.running), 1);
    const distance = (kind) => now[kind].map((x, i) => Math.sqrt(squared(x.map((v, k) => v - before[kind][i][k]))));
    const moved = Math.max(...distance("group"), ...distance("running"));
    const most = Math.max(...distance("none"));
    const shifted = text("bandit_shifted", {
      shift: settings.shift, before: ratio(before), moved: number(moved, 3), most: number(most, 3),
    });
    told.textContent = text("bandit_told", { size: number(size), times: ratio(now), count: BATCHES })
      + (settings.shift ? text("between") + shifted : "");
    if (!alone) {
      const [none, group, running] = BASELINES.map((kind) => countOf(runs[kind], found));
      learned.textContent = text("bandit_learned", {
        steps: STEPS, runs: RUNS, none, group, running, lost: countOf(runs.none, lost),
      });
    }
  }

  const turned = (name) => (x) => { settings[name] = x; show(); };
  const turnable = (name, label, min, max, step, show = String) =>
    slider(name, text(label), { min, max, step, value: settings[name], show, change: turned(name) });
  const again = button(text("bandit_again"), () => turned("seed")((settings.seed + 1) % 1000), { id: "bandit_again" });
  place.append(
    ...(alone ? [] : [h("h2", {}, text("bandit_title")), h("p", { class: "wide" }, text("bandit_about"))]),
    h("div", { class: "sliders" },
      turnable("shift", "bandit_shift", 0, 20, 1, (x) => `+${x}`),
      turnable("samples", "bandit_samples", 1, 64, 1),
      turnable("start", "bandit_start", 0.05, 0.9, 0.05, (x) => number(x)),
      alone ? "" : turnable("rate", "rate", 0.05, 1, 0.05, (x) => number(x)),
      h("div", {}, again)),
    cards, h("div", { class: "two" }, told, alone ? "" : learned),
    h("details", {}, h("summary", {}, text("bandit_read")), quiet("bandit_legend", { count: BATCHES, runs: RUNS })));
  show();
}
