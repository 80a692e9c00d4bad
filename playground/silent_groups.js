// Why do the weights move while nearly all groups are silent? Mission "Switch the KL off", its first half
// (only the form pays, BETA 0, seed 0), with one thing changed from step 25 on. Node 20:
//
//     node --experimental-default-type=module playground/silent_groups.js as_it_is
//
// or `no_decay` (no weight decay) or `no_gradient` (all gradients 0: what's left is AdamW's average of
// earlier ones, and weight decay). Prints each step, and 128 held-out questions every 25 steps.

import { readFileSync } from "node:fs";
import { createMoments, learningRate, random } from "./grpo.js";
import { SIZE } from "./model.js";
import { POINTS } from "./rewards.js";

const [CHANGE = "as_it_is"] = process.argv.slice(2), FROM = 25, STEPS = 75;
const page = readFileSync(`${import.meta.dirname}/../5_GRPO_Maxtext/assets/playground.html`, "utf8");
const element = (id) => page.split(`id="${id}">`)[1].split("</script>")[0];
globalThis.document = { getElementById: (id) => ({ textContent: element(id) }) };
globalThis.navigator ??= {}; // Node 20 has none
const { HELD_OUT, unpack } = await import("./pool.js");
const DATA = JSON.parse(document.getElementById("data").textContent), QUESTIONS = unpack(DATA.train);

// The worker, without a thread of its own.
await import("./worker.js");
const ask = (task, given = {}) => new Promise((done, fail) => {
  globalThis.postMessage = ({ answer, error }) => (error === undefined ? done(answer) : fail(error));
  globalThis.onmessage({ data: { task, ...given } });
});
const still = Object.fromEntries(Object.keys(POINTS).map((name) => [name, 0]));
const points = { ...still, format: 3, tag: 0.5 };
const length = (list) => Math.sqrt(list.reduce((sum, x) => sum + x * x, 0));

async function evaluate(step) {
  const answers = await ask("evaluate", { model: "own", questions: HELD_OUT, seed: 0 });
  const right = answers.filter((answer) => answer.right).length / answers.length;
  console.log(`step ${step}: ${(100 * right).toFixed(1)} % of the held-out questions right`);
}

await ask("open", { data: DATA, words: DATA.vocabulary, questions: 16, answers: 8 });
const mean = new Float64Array(SIZE), square = new Float64Array(SIZE);
for (let step = 0; step < STEPS; step++) {
  if (step % 25 === 0) await evaluate(step);
  const order = random(0, step), chosen = new Set();
  while (chosen.size < 16) chosen.add(Math.floor(order() * QUESTIONS.length));
  const { groups, gradient } = await ask("step", {
    questions: [...chosen].map((i) => QUESTIONS[i]), answers: 8, points, seed: 0, step, temperature: 1,
    beta: 0, epsilon: 0.2, count: 128,
  });
  const { weights } = await ask("saved"), rate = learningRate(1e-3, step, 200);
  const changed = step >= FROM, norm = length(gradient);
  const scale = changed && CHANGE === "no_gradient" ? 0 : 1 / Math.max(1, norm);
  const decay = changed && CHANGE === "no_decay" ? 0 : 0.1;
  const c1 = 1 - 0.9 ** (step + 1), c2 = 1 - 0.99 ** (step + 1);
  const byAdam = weights.map((w, i) => {
    const g = gradient[i] * scale;
    mean[i] = 0.9 * mean[i] + 0.1 * g;
    square[i] = 0.99 * square[i] + 0.01 * g * g;
    return rate * (mean[i] / c1 / (Math.sqrt(square[i] / c2) + 1e-8));
  });
  const byDecay = weights.map((w) => rate * decay * w);
  weights.forEach((w, i) => { weights[i] = w - byAdam[i] - byDecay[i]; });
  await ask("restore", { weights, moments: createMoments(SIZE) });
  const silent = groups.filter((group) => group.every(({ advantage }) => advantage === 0)).length;
  console.log(`step ${step + 1}: ${silent} of 16 groups silent, gradient ${norm.toFixed(3)}, `
    + `moved by Adam ${length(byAdam).toFixed(3)}, by decay ${length(byDecay).toFixed(3)}`);
}
await evaluate(STEPS);
