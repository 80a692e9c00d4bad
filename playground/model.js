// The tiny Llama in float32: forward and backward over rows, one row per token of a sequence.
//
// A row knows the row before it (its parent), so answers share the rows of their prompt, and drawing a token
// adds one row. What the forward pass leaves in each row is both the key-value cache and all that the backward
// pass needs: a step of training computes its answers once.

export const VOCABULARY = 76;
export const PAD = 0;
export const BEGIN = 1;
export const END = 2;
export const ASSISTANT = 4;
const D = 96, LAYERS = 3, HEADS = 4, SHARED = 2, HEAD = 24, F = 256; // SHARED query heads read one key head
const V = 80; // logits in memory: the vocabulary, filled up to a multiple of 8
const QKV = 192, KEY = 96, VALUE = 144; // columns of queries | keys | values in one matrix
export const CONTEXT = 56; // tokens of prompt and answer together
const EPSILON = 1e-5;

// Matrices are [in, out]. As in MaxText, the queries' are divided by sqrt(HEAD): attention scales nothing, and
// AdamW takes the same steps as in the main script. The head's last 4 columns are 0 and stay 0.
const LAYER = [
  ["norm1", 1, D], ["qkv", D, QKV], ["out", D, D], ["norm2", 1, D], ["gate_up", D, 2 * F], ["down", F, D],
];
export const SHAPES = [
  ["embedding", VOCABULARY, D],
  ...Array.from({ length: LAYERS }, (_, l) => LAYER.map(([name, ...shape]) => [`${name}${l}`, ...shape])).flat(),
  ["norm", 1, D],
  ["head", D, V],
];
export const SIZE = SHAPES.reduce((sum, [, rows, columns]) => sum + rows * columns, 0);

// Llama 3.1's scaled rotary frequencies (github.com/meta-llama/llama-models, llama3/model.py) by position.
function rotations() {
  const angles = new Float32Array(CONTEXT * HEAD);
  for (let i = 0; i < HEAD / 2; i++) {
    const frequency = 500000 ** (-2 * i / HEAD);
    const smooth = Math.min(1, Math.max(0, ((8192 * frequency) / (2 * Math.PI) - 1) / (4 - 1)));
    const scaled = ((1 - smooth) / 8 + smooth) * frequency;
    for (let p = 0; p < CONTEXT; p++) {
      angles[p * HEAD + 2 * i] = Math.cos(p * scaled);
      angles[p * HEAD + 2 * i + 1] = Math.sin(p * scaled);
    }
  }
  return angles;
}
const ROTATIONS = rotations();

/**
 * Memory of a worker, with the WebAssembly functions that work in it.
 *
 * array(length) and integers(length) take the next piece of it: { at: its address, numbers: a view }.
 */
export async function createMemory(wasm, megabytes) {
  const memory = new WebAssembly.Memory({ initial: megabytes * 16 }); // pages of 64 KiB; used once written to
  const { instance } = await WebAssembly.instantiate(wasm, { env: { memory } });
  let used = 0;
  const take = (Kind) => (length) => {
    const at = used;
    used += Math.ceil(length / 4) * 16; // every array begins on a 16-byte boundary
    return { at, numbers: new Kind(memory.buffer, at, length) };
  };
  return { array: take(Float32Array), integers: take(Int32Array), ...instance.exports };
}

/** SIZE weights, or their gradient: an array, and where each matrix begins (an index into `numbers`). */
export function createWeights(memory) {
  const places = {};
  let next = 0;
  for (const [name, rows, columns] of SHAPES) {
    places[name] = next;
    next += rows * columns;
  }
  return { ...memory.array(SIZE), places };
}

/** Room for `capacity` rows: their tokens, their sequences, and what each layer leaves of them. */
export function createRows(memory, capacity) {
  const room = (columns) => memory.array((capacity + 4) * columns); // 4: products go by four rows
  return {
    memory, capacity, count: 0,
    token: new Int32Array(capacity),
    length: new Int32Array(capacity), // of the sequence up to and including this row
    context: memory.integers(capacity * CONTEXT), // its rows, first to last
    x: Array.from({ length: LAYERS + 1 }, () => room(D)), // the residual stream before each layer, and at the end
    layers: Array.from({ length: LAYERS }, () => ({
      r1: room(1), h1: room(D), qkv: room(QKV), shares: room(HEADS * CONTEXT), heads: room(D),
      x2: room(D), r2: room(1), h2: room(D), gateUp: room(2 * F), hidden: room(F),
    })),
    r: room(1), h: room(D), logits: room(V),
  };
}

/** Appends a token behind row `parent` (-1: a sequence begins). Returns its row; `forward` computes it. */
export function append(rows, token, parent) {
  const row = rows.count++, context = rows.context.numbers;
  const before = parent < 0 ? 0 : rows.length[parent];
  if (row >= rows.capacity) throw new RangeError(`${rows.capacity} rows are full`);
  if (before >= CONTEXT) throw new RangeError(`a sequence has at most ${CONTEXT} tokens`);
  context.copyWithin(row * CONTEXT, parent * CONTEXT, parent * CONTEXT + before);
  context[row * CONTEXT + before] = row;
  rows.length[row] = before + 1;
  rows.token[row] = token;
  return row;
}

/** C = A W for rows `from` to `to`, or C += A W; A [row, k], C [row, n], W [k, n] begins at address W. */
function project({ matmul }, A, k, W, C, n, from, to, add = 0) {
  const m = (to - from + 3) & ~3;
  matmul(A.at + 4 * from * k, 4 * k, 4, W, 4 * n, C.at + 4 * from * n, 4 * n, m, n, k, add);
}

/** h = x / rms(x) * weight, and r = 1 / rms(x) (Zhang & Sennrich, arXiv 1910.07467, eq. 4). */
function normalize(x, weight, r, h, from, to) {
  for (let s = from; s < to; s++) {
    let sum = 0;
    for (let i = s * D; i < (s + 1) * D; i++) sum += x[i] * x[i];
    r[s] = 1 / Math.sqrt(sum / D + EPSILON);
    for (let i = 0; i < D; i++) h[s * D + i] = x[s * D + i] * r[s] * weight[i];
  }
}

/** Turns queries and keys by their position (arXiv 2104.09864); `sign` -1 turns a gradient back. */
function rotate(qkv, lengths, from, to, sign) {
  for (let s = from; s < to; s++) {
    const turn = (lengths[s] - 1) * HEAD;
    for (let start = s * QKV; start < s * QKV + VALUE; start += HEAD) {
      for (let i = 0; i < HEAD / 2; i++) {
        const cos = ROTATIONS[turn + 2 * i], sin = sign * ROTATIONS[turn + 2 * i + 1];
        const a = qkv[start + i], b = qkv[start + HEAD / 2 + i];
        qkv[start + i] = a * cos - b * sin;
        qkv[start + HEAD / 2 + i] = b * cos + a * sin;
      }
    }
  }
}

/** Addresses of head h of row s: its query, the columns of the keys and values it reads, its shares, its output. */
function addressesOf(qkv, shares, heads, s, h) {
  const group = 4 * ((h / SHARED) | 0) * HEAD;
  return {
    query: qkv.at + 4 * (s * QKV + h * HEAD),
    keys: qkv.at + 4 * KEY + group,
    values: qkv.at + 4 * VALUE + group,
    shares: shares.at + 4 * (s * HEADS + h) * CONTEXT,
    output: heads.at + 4 * (s * D + h * HEAD),
  };
}

/** Each head's mixture of values, by softmax(q . k) over the sequence so far. */
function attend(rows, { qkv, shares, heads }, from, to) {
  const { dots, mix } = rows.memory, all = shares.numbers;
  for (let s = from; s < to; s++) {
    const n = rows.length[s], context = rows.context.at + 4 * s * CONTEXT;
    for (let h = 0; h < HEADS; h++) {
      const at = addressesOf(qkv, shares, heads, s, h), first = at.shares - shares.at >> 2;
      dots(at.query, at.keys, 4 * QKV, context, n, at.shares);
      let largest = -Infinity, sum = 0;
      for (let j = first; j < first + n; j++) largest = Math.max(largest, all[j]);
      for (let j = first; j < first + n; j++) sum += all[j] = Math.exp(all[j] - largest);
      for (let j = first; j < first + n; j++) all[j] /= sum;
      mix(at.shares, at.values, 4 * QKV, context, n, at.output);
    }
  }
}

/** hidden = silu(gate) * up (Shazeer, arXiv 2002.05202). */
function gated(gateUp, hidden, from, to) {
  for (let s = from; s < to; s++) {
    for (let i = 0; i < F; i++) {
      const gate = gateUp[s * 2 * F + i];
      hidden[s * F + i] = (gate / (1 + Math.exp(-gate))) * gateUp[s * 2 * F + F + i];
    }
  }
}

/** Computes rows `from` to the last one: their logits [row, V], of the token that follows. */
export function forward(rows, weights, from) {
  const to = rows.count, { memory, x } = rows, W = weights.numbers;
  const place = (name) => weights.at + 4 * weights.places[name];
  const scale = (name) => W.subarray(weights.places[name], weights.places[name] + D);
  const copy = (source, target) => target.numbers.set(source.numbers.subarray(from * D, to * D), from * D);
  for (let s = from; s < to; s++) x[0].numbers.set(W.subarray(rows.token[s] * D, (rows.token[s] + 1) * D), s * D);
  rows.layers.forEach((layer, l) => {
    normalize(x[l].numbers, scale(`norm1${l}`), layer.r1.numbers, layer.h1.numbers, from, to);
    project(memory, layer.h1, D, place(`qkv${l}`), layer.qkv, QKV, from, to);
    rotate(layer.qkv.numbers, rows.length, from, to, 1);
    attend(rows, layer, from, to);
    copy(x[l], layer.x2);
    project(memory, layer.heads, D, place(`out${l}`), layer.x2, D, from, to, 1);
    normalize(layer.x2.numbers, scale(`norm2${l}`), layer.r2.numbers, layer.h2.numbers, from, to);
    project(memory, layer.h2, D, place(`gate_up${l}`), layer.gateUp, 2 * F, from, to);
    gated(layer.gateUp.numbers, layer.hidden.numbers, from, to);
    copy(layer.x2, x[l + 1]);
    project(memory, layer.hidden, F, place(`down${l}`), x[l + 1], D, from, to, 1);
  });
  normalize(x[LAYERS].numbers, scale("norm"), rows.r.numbers, rows.h.numbers, from, to);
  project(memory, rows.h, D, place("head"), rows.logits, V, from, to);
}

/** The logits after a row, [VOCABULARY]: a view. */
export const logitsAfter = (rows, row) => rows.logits.numbers.subarray(row * V, row * V + VOCABULARY);

/** log softmax of logits / temperature, [VOCABULARY] float64. */
export function logProbs(logits, temperature = 1) {
  const log = new Float64Array(VOCABULARY);
  let largest = -Infinity, sum = 0;
  for (let v = 0; v < VOCABULARY; v++) largest = Math.max(largest, logits[v]);
  for (let v = 0; v < VOCABULARY; v++) sum += Math.exp(log[v] = (logits[v] - largest) / temperature);
  const total = Math.log(sum);
  for (let v = 0; v < VOCABULARY; v++) log[v] -= total;
  return log;
}

/** Memory of the backward pass for `capacity` rows: the gradients by what a layer leaves in a row. */
export function createScratch(memory, capacity) {
  const room = (columns) => memory.array((capacity + 4) * columns);
  return {
    logits: room(V), x: room(D), h: room(D), heads: room(D), qkv: room(QKV), gateUp: room(2 * F), hidden: room(F),
    shares: memory.array(CONTEXT), transposed: memory.array(2 * F * D),
  };
}

/** Where the gradient by the logit of token v after a row stands in scratch.logits. */
export const logitIndex = (row, v) => row * V + v;

/**
 * The gradient by the weights, added to `gradient`.
 *
 * scratch.logits holds the gradient by the logits; the forward pass of all rows has been made.
 */
export function backward(rows, weights, gradient, scratch) {
  const n = rows.count, { memory, x } = rows, W = weights.numbers, G = gradient.numbers, { places } = weights;

  // dW += A^T dC, and dA = dC W^T; A [row, k], C [row, m].
  const product = (A, k, dC, m, name, dA) => {
    memory.matmul(A.at, 4, 4 * k, dC.at, 4 * m, gradient.at + 4 * places[name], 4 * m, k, m, n, 1);
    const transposed = scratch.transposed.numbers, first = places[name];
    for (let i = 0; i < k; i++) for (let j = 0; j < m; j++) transposed[j * k + i] = W[first + i * m + j];
    project(memory, dC, m, scratch.transposed.at, dA, k, 0, n);
  };
  const norm = (name, input, r) => normalizeBackward(
    input.numbers, r.numbers, W, G, places[name], scratch.h.numbers, scratch.x.numbers, n,
  );

  scratch.x.numbers.fill(0, 0, n * D);
  product(rows.h, D, scratch.logits, V, "head", scratch.h);
  norm("norm", x[LAYERS], rows.r);
  for (let l = LAYERS - 1; l >= 0; l--) {
    const layer = rows.layers[l];
    product(layer.hidden, F, scratch.x, D, `down${l}`, scratch.hidden);
    gatedBackward(layer.gateUp.numbers, scratch.hidden.numbers, scratch.gateUp.numbers, n);
    product(layer.h2, D, scratch.gateUp, 2 * F, `gate_up${l}`, scratch.h);
    norm(`norm2${l}`, layer.x2, layer.r2);
    product(layer.heads, D, scratch.x, D, `out${l}`, scratch.heads);
    attendBackward(rows, layer, scratch);
    rotate(scratch.qkv.numbers, rows.length, 0, n, -1);
    product(layer.h1, D, scratch.qkv, QKV, `qkv${l}`, scratch.h);
    norm(`norm1${l}`, x[l], layer.r1);
  }
  const dx = scratch.x.numbers;
  for (let s = 0; s < n; s++) for (let i = 0; i < D; i++) G[rows.token[s] * D + i] += dx[s * D + i];
}

/** dx += the gradient through h = x r w, and dw += its own; w begins at W[first]. */
function normalizeBackward(x, r, W, G, first, dh, dx, n) {
  for (let s = 0; s < n; s++) {
    let dot = 0;
    for (let i = 0; i < D; i++) {
      const through = dh[s * D + i] * x[s * D + i] * r[s];
      G[first + i] += through;
      dot += through * W[first + i];
    }
    dot *= (r[s] * r[s]) / D;
    for (let i = 0; i < D; i++) dx[s * D + i] += r[s] * dh[s * D + i] * W[first + i] - dot * x[s * D + i];
  }
}

function gatedBackward(gateUp, dHidden, d, n) {
  for (let s = 0; s < n; s++) {
    for (let i = 0; i < F; i++) {
      const gate = gateUp[s * 2 * F + i], up = gateUp[s * 2 * F + F + i], own = dHidden[s * F + i];
      const sigmoid = 1 / (1 + Math.exp(-gate));
      d[s * 2 * F + i] = own * up * sigmoid * (1 + gate * (1 - sigmoid));
      d[s * 2 * F + F + i] = own * gate * sigmoid;
    }
  }
}

function attendBackward(rows, layer, scratch) {
  const { dots, mix, scatter } = rows.memory, all = layer.shares.numbers, slopes = scratch.shares;
  scratch.qkv.numbers.fill(0, 0, rows.count * QKV);
  for (let s = 0; s < rows.count; s++) {
    const n = rows.length[s], context = rows.context.at + 4 * s * CONTEXT;
    for (let h = 0; h < HEADS; h++) {
      const at = addressesOf(layer.qkv, layer.shares, layer.heads, s, h);
      const d = addressesOf(scratch.qkv, layer.shares, scratch.heads, s, h);
      const first = at.shares - layer.shares.at >> 2, slope = slopes.numbers;
      dots(d.output, at.values, 4 * QKV, context, n, slopes.at);
      scatter(at.shares, d.values, 4 * QKV, context, n, d.output);
      let mean = 0;
      for (let j = 0; j < n; j++) mean += all[first + j] * slope[j];
      for (let j = 0; j < n; j++) slope[j] = all[first + j] * (slope[j] - mean); // softmax
      mix(slopes.at, at.keys, 4 * QKV, context, n, d.query);
      scatter(slopes.at, d.keys, 4 * QKV, context, n, at.query);
    }
  }
}
