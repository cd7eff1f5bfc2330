// The clock of the race: all lanes at the same second, played again or moved by hand.

import { inSeconds } from "./lane.js";

const TICKS = 1000; // positions of the slider

/** Slider and button that move all lanes through time. */
export class Replay {
  constructor(by, moved) {
    this.bar = by("replay");
    this.play = by("play");
    this.clock = by("clock");
    this.shown = by("clock-shown");
    this.moved = moved;
    this.lanes = [];
    this.timer = null;
    this.play.addEventListener("click", () => (this.timer === null ? this.#start() : this.pause()));
    this.clock.addEventListener("input", () => {
      this.pause();
      this.#show((Number(this.clock.value) / TICKS) * this.length);
      this.moved();
    });
  }

  /** Offer a replay of these lanes, or of none. */
  offer(lanes) {
    this.pause();
    this.lanes = lanes.filter((lane) => lane.frames.length > 1);
    this.length = Math.max(0, ...this.lanes.map((lane) => lane.seconds));
    this.bar.hidden = this.length === 0;
    this.#place(this.length);
  }

  #place(seconds) {
    this.clock.value = this.length ? Math.round((seconds / this.length) * TICKS) : TICKS;
    this.shown.textContent = inSeconds(seconds);
    this.clock.setAttribute("aria-valuetext", `${seconds.toFixed(1)} seconds of ${this.length.toFixed(1)}`);
    this.at = seconds;
  }

  #show(seconds) {
    this.#place(seconds);
    for (const lane of this.lanes) lane.showAt(seconds);
  }

  #start() {
    const from = this.at >= this.length ? 0 : this.at;
    // A race of a blink is slowed down, one of minutes shortened: 4 to 20 seconds on the screen.
    const pace = this.length / Math.min(20, Math.max(4, this.length));
    const began = performance.now();
    this.play.textContent = "Pause";
    const tick = () => {
      const seconds = from + ((performance.now() - began) / 1000) * pace;
      if (seconds >= this.length) {
        this.#show(this.length);
        this.pause();
        this.moved();
        return;
      }
      this.#show(seconds);
      this.timer = requestAnimationFrame(tick);
    };
    this.timer = requestAnimationFrame(tick);
  }

  /** Stop playing, where it stands. */
  pause() {
    if (this.timer !== null) cancelAnimationFrame(this.timer);
    this.timer = null;
    this.play.textContent = "Replay";
  }
}
