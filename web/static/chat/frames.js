// Drawing at most once a frame.

const due = new Set();
let notBefore = 0;

/**
 * Call `draw` in the next frame, once however often it is asked for. Frames that took long are followed by as long a
 * rest, so that the page stays usable whatever there is to draw.
 */
export function nextFrame(draw) {
  if (!due.size) requestAnimationFrame(flush);
  due.add(draw);
}

function flush(now) {
  if (now < notBefore) return requestAnimationFrame(flush);
  const draws = [...due];
  due.clear();
  const begun = performance.now();
  for (const draw of draws) draw();
  const ended = performance.now();
  notBefore = ended - begun > 8 ? ended + (ended - begun) : 0;
}
