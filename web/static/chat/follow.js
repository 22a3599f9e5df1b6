// Staying at the end of what grows, but only while the reader is there.

const NEAR_PX = 40;
const EARLY_PX = 800;

export class Follower {
  #scroller;
  #button;
  #following = true;
  #top = 0;
  onNearTop = () => {};

  /** `button` is shown while the reader is elsewhere, and leads back. */
  constructor(scroller, content, button) {
    this.#scroller = scroller;
    this.#button = button;
    scroller.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    button.addEventListener("click", () => this.toEnd());
    const sizes = new ResizeObserver(() => this.#following && this.#pin());
    sizes.observe(content);
    sizes.observe(scroller);
  }

  toEnd() {
    this.#following = true;
    this.#button.hidden = true;
    this.#pin();
  }

  /** Call `insert`, which adds to the top, and leave what the reader sees where it is. */
  insertAbove(insert) {
    const scroller = this.#scroller;
    const below = scroller.scrollHeight - scroller.scrollTop;
    scroller.style.setProperty("overflow-anchor", "none"); // or the browser would correct it a second time
    insert();
    scroller.scrollTop = scroller.scrollHeight - below;
    requestAnimationFrame(() => scroller.style.removeProperty("overflow-anchor"));
  }

  #pin() {
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#top = this.#scroller.scrollTop;
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroller;
    if (scrollHeight - scrollTop - clientHeight < NEAR_PX) this.#following = true;
    else if (scrollTop < this.#top) this.#following = false; // only the reader scrolls up
    this.#top = scrollTop;
    this.#button.hidden = this.#following;
    if (scrollTop < EARLY_PX) this.onNearTop();
  }
}
