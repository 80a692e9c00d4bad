// What a training has come to, in sentences that follow from the points set and from what was measured.

const LEAST = { right: 0.1, form: 0.1, length: 2 }; // a smaller change may be chance

/** Which way the points pull each quantity: 1, -1, or 0 where nothing pays for it. */
export function paid(points) {
  return {
    right: Math.sign(points.right + points.number - points.wrong),
    form: Math.sign(points.format + 8 * points.tag), // four tags, each once or not: from -tag to +tag
    length: Math.sign(points.token),
  };
}

/** -1, 0 or 1: fell, about the same, rose. */
export const moved = (name, before, after) => (Math.abs(after - before) < LEAST[name] ? 0 : Math.sign(after - before));

/**
 * [key, values] of each sentence.
 *
 * before, after: { right, form } of the held-out questions, { length, reward, kl } of the answers in training.
 */
export function verdict(points, before, after) {
  const pays = paid(points), said = [];
  if (Object.values(points).every((x) => x === 0)) return [["verdict_nothing", {}]];
  const change = after.reward - before.reward, least = 0.1 * Math.max(0.1, Math.abs(before.reward), Math.abs(after.reward));
  const rewards = { before: before.reward, after: after.reward };
  said.push([change > least ? "verdict_more" : change < -least ? "verdict_less" : "verdict_same", rewards]);
  for (const name of ["right", "form", "length"]) {
    const way = moved(name, before[name], after[name]);
    const key = way === 0 ? "" : pays[name] === 0 ? "unpaid" : way === pays[name] ? "paid" : "against";
    if (key) said.push([`verdict_${key}`, { name, way, before: before[name], after: after[name] }]);
  }
  if (after.kl > 0.5) said.push(["verdict_far", { kl: after.kl }]);
  return said;
}
