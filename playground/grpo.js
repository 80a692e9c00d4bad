// GRPO, as in 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py: drawing, advantage, loss and its gradient, AdamW.

import { BEGIN, END, PAD, ASSISTANT, VOCABULARY, append, backward, forward, logProbs, logitIndex, logitsAfter } from "./model.js";

export const PROMPT_LIMIT = 28; // tokens: MAX_PROMPT_LENGTH
export const ANSWER_LIMIT = 28; // tokens: TOTAL_GENERATION_STEPS
export const POLICY = { temperature: 1, topK: VOCABULARY, topP: 1 }; // training draws from the policy itself
export const STANDARD = { temperature: 0.7, topK: 50, topP: 0.95 }; // held-out questions, as EVAL_CONFIG

/** Uniform numbers in [0, 1) that follow from the integers given (mulberry32; each integer is mixed in). */
export function random(...seeds) {
  let state = 0x9e3779b9;
  const next = () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t = (t + Math.imul(t ^ (t >>> 7), t | 61)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
  for (const seed of seeds) {
    state = (state ^ Math.imul(seed + 1, 0x85ebca6b)) | 0;
    next();
    state = (state ^ (next() * 2 ** 32)) | 0;
  }
  return next;
}

/** Probabilities after temperature, top-k and top-p, [VOCABULARY]; padding is never drawn. */
export function distribution(logits, { temperature, topK, topP }) {
  const masked = Float64Array.from(logits);
  masked[PAD] = -Infinity;
  const p = logProbs(masked, temperature).map(Math.exp);
  if (topK < VOCABULARY || topP < 1) {
    let before = 0;
    const order = [...p.keys()].sort((a, b) => p[b] - p[a]);
    const kept = order.filter((token, rank) => {
      const keep = rank < topK && before <= topP; // the token that crosses the share is still kept
      before += p[token];
      return keep;
    });
    const sum = kept.reduce((total, token) => total + p[token], 0);
    const set = new Set(kept);
    return p.map((x, token) => (set.has(token) ? x / sum : 0));
  }
  return p;
}

/** One token, by its probability. */
export function draw(probabilities, uniform) {
  let left = uniform, last = 0;
  for (let token = 0; token < probabilities.length; token++) {
    if (probabilities[token] === 0) continue;
    last = token;
    left -= probabilities[token];
    if (left < 0) break;
  }
  return last;
}

export const promptOf = (question) => [BEGIN, ...question, ASSISTANT];

/**
 * Draws answers to questions, all side by side, one token per pass.
 *
 * prompts: [{ tokens, randoms: one generator per answer }]. The rows stay: what `answers` holds of each is
 * { tokens, rows: the row whose logits each token was drawn from }, grouped by prompt.
 */
export function drawAnswers(rows, weights, prompts, sampling) {
  rows.count = 0;
  const groups = prompts.map(({ tokens, randoms }) => {
    const last = tokens.reduce((parent, token) => append(rows, token, parent), -1);
    return randoms.map((random) => ({ tokens: [], rows: [], at: last, random }));
  });
  let open = groups.flat(), from = 0;
  while (open.length) {
    forward(rows, weights, from);
    from = rows.count;
    for (const answer of open) {
      const token = draw(distribution(logitsAfter(rows, answer.at), sampling), answer.random());
      answer.tokens.push(token);
      answer.rows.push(answer.at);
    }
    open = open.filter(({ tokens }) => tokens.at(-1) !== END && tokens.length < ANSWER_LIMIT);
    for (const answer of open) answer.at = append(rows, answer.tokens.at(-1), answer.at);
  }
  return groups;
}

/** Lays out given answers as `drawAnswers` would have left them, and computes them in one pass. */
export function layOut(rows, weights, prompts) {
  rows.count = 0;
  const groups = prompts.map(({ tokens, answers }) => {
    const last = tokens.reduce((parent, token) => append(rows, token, parent), -1);
    return answers.map((answer) => {
      const places = [last];
      for (const token of answer.slice(0, -1)) places.push(append(rows, token, places.at(-1)));
      return { tokens: answer, rows: places };
    });
  });
  forward(rows, weights, 0);
  return groups;
}

/** A_i = (R_i - mean) / std of the group's rewards, std with n - 1 (arXiv 2402.03300, section 4.1.2). */
export function groupAdvantage(rewards) {
  const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
  const squares = rewards.reduce((sum, r) => sum + (r - mean) ** 2, 0);
  const std = Math.sqrt(squares / (rewards.length - 1));
  return rewards.map((r) => (r - mean) / (std + 1e-6)); // 1e-6: equal rewards would give 0 / 0
}

/** min(ratio A, clip(ratio) A) and its derivative by the ratio. */
export function clippedObjective(ratio, A, epsilon) {
  const clipped = Math.min(1 + epsilon, Math.max(1 - epsilon, ratio)) * A;
  return clipped < ratio * A ? { value: clipped, slope: 0 } : { value: ratio * A, slope: A };
}

/**
 * The loss of answers, and the weights' gradient, added to `gradient`.
 *
 * groups: of `drawAnswers`, each answer with `advantage` and, from the second update on, with `old`, its tokens'
 * log-probs when it was drawn; without them pi_old is pi, and they are noted. count: answers of all workers,
 * which the sum is divided by. epsilon: the clip range, Infinity for none. reference: { rows, weights } of the
 * frozen model: the KL to it is measured even if beta is 0. temperature: of the policy, which the answers were drawn
 * from. Notes in each answer its tokens' `pushes`: minus the gradient by the token's own logit, times `count`.
 */
export function lossAndGradient(rows, weights, gradient, scratch, groups, given) {
  const { beta, epsilon, count, reference, temperature = 1 } = given;
  const slopes = scratch.logits.numbers, other = reference.rows;
  slopes.fill(0);
  other.count = rows.count;
  other.token.set(rows.token);
  other.length.set(rows.length);
  other.context.numbers.set(rows.context.numbers);
  forward(other, reference.weights, 0);
  const figures = { loss: 0, kl: 0, tokens: 0, entropy: 0, clipped: 0 };
  for (const answer of groups.flat()) {
    const share = 1 / (count * answer.tokens.length); // mean_i mean_t
    const logOf = (row) => logProbs(logitsAfter(rows, row), temperature);
    const old = (answer.old ??= answer.tokens.map((token, t) => logOf(answer.rows[t])[token]));
    answer.pushes = [];
    answer.tokens.forEach((token, t) => {
      const row = answer.rows[t], log = logOf(row), ratio = Math.exp(log[token] - old[t]);
      const objective = clippedObjective(ratio, answer.advantage, epsilon);
      const d = logProbs(logitsAfter(other, row), temperature)[token] - log[token];
      const kl = Math.expm1(d) - d; // k3 (arXiv 2402.03300, eq. 4)
      const slope = -objective.slope * ratio - beta * Math.expm1(d); // of the loss, by the token's log-prob
      figures.loss += share * (beta * kl - objective.value);
      figures.kl += kl;
      figures.tokens += 1;
      figures.clipped += Number(objective.slope === 0 && answer.advantage !== 0);
      for (let v = 0; v < VOCABULARY; v++) {
        const p = Math.exp(log[v]);
        // Answers share their prompt's last row: gradients add up.
        slopes[logitIndex(row, v)] -= (share * slope * p) / temperature;
        if (p > 0) figures.entropy -= p * log[v];
      }
      slopes[logitIndex(row, token)] += (share * slope) / temperature;
      answer.pushes.push((-share * count * slope * (1 - Math.exp(log[token]))) / temperature);
    });
  }
  backward(rows, weights, gradient, scratch);
  return figures;
}

/** Linear warm-up over a tenth of the steps, then cosine decay to 0. `step` counts from 0. */
export function learningRate(peak, step, steps) {
  const warmup = Math.floor(0.1 * steps);
  if (step < warmup) return (peak * step) / warmup;
  return (peak * (1 + Math.cos((Math.PI * (step - warmup)) / (steps - warmup)))) / 2;
}

export const createMoments = (size) => ({ mean: new Float32Array(size), square: new Float32Array(size), updates: 0 });

/**
 * AdamW behind a gradient-norm clip (MAX_GRAD_NORM, B1, B2, WEIGHT_DECAY of the main script).
 *
 * `update` returns the gradient's norm, and `moved`, how far the weights have gone: the length of their change.
 */
export function createOptimizer(size, moments = createMoments(size)) {
  const { mean, square } = moments;
  return function update(weights, gradient, rate) {
    let sum = 0;
    for (const g of gradient) sum += g * g;
    const norm = Math.sqrt(sum);
    if (!Number.isFinite(norm)) return { norm, moved: 0 }; // an update that is not finite is skipped, not applied
    const scale = norm < 1 ? 1 : 1 / norm;
    moments.updates += 1;
    const c1 = 1 - 0.9 ** moments.updates, c2 = 1 - 0.99 ** moments.updates;
    let moved = 0;
    for (let i = 0; i < size; i++) {
      const g = gradient[i] * scale;
      mean[i] = 0.9 * mean[i] + 0.1 * g;
      square[i] = 0.99 * square[i] + 0.01 * g * g;
      const change = rate * (mean[i] / c1 / (Math.sqrt(square[i] / c2) + 1e-8) + 0.1 * weights[i]);
      weights[i] -= change;
      moved += change * change;
    }
    return { norm, moved: Math.sqrt(moved) };
  };
}
