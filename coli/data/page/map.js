// The heat map: one cell an expert, filled by where it is, flashing when it is used. A canvas, so its size costs no DOM.

const FADE_MS = 700;
const PLACES = { p: "pinned", c: "cached", ".": "on disk" };

export class HeatMap {
  #canvas; #note; #layers = []; #columns = 0; #state = []; #used = []; #lit = new Float64Array(0); #cursor = null;
  #colors = {}; #frame = 0; #still = matchMedia("(prefers-reduced-motion: reduce)");

  constructor(canvas, note) {
    this.#canvas = canvas;
    this.#note = note;
    new ResizeObserver(() => this.#resize()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#recolor());
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("blur", () => this.#name(null));
    canvas.addEventListener("pointerleave", () => this.#name(null));
    this.#recolor();
  }

  // state: a string a layer, used: counts a layer, both of one place an expert.
  show(layers, { state, used }) {
    const columns = state.length ? state[0].length : 0;
    const now = performance.now();
    const fresh = layers.length !== this.#layers.length || columns !== this.#columns;
    if (fresh) {
      this.#lit = new Float64Array(layers.length * columns).fill(-FADE_MS);
    } else {
      used.forEach((row, y) => row.forEach((count, x) => {
        if (count > this.#used[y][x]) this.#lit[y * columns + x] = now;
        else if (this.#still.matches) this.#lit[y * columns + x] = -FADE_MS;
      }));
    }
    [this.#layers, this.#columns, this.#state, this.#used] = [layers, columns, state, used];
    this.#canvas.hidden = columns === 0;
    if (fresh) this.#resize();
    const places = state.join("");
    const count = (place) => places.split(place).length - 1;
    this.#canvas.setAttribute("aria-label",
      `Heat map of ${layers.length} layers by ${columns} experts: ${count("p")} pinned, ${count("c")} cached, ${count(".")} on disk`);
    this.#name(this.#cursor);
    this.#draw();
  }

  // Where cell (layer row y, expert x) is, in pixels of the canvas.
  cell(y, x) {
    const { width, height } = this.#canvas;
    const [left, right] = [x, x + 1].map((at) => Math.round((at * width) / this.#columns));
    const [top, bottom] = [y, y + 1].map((at) => Math.round((at * height) / this.#layers.length));
    return { left, top, width: right - left, height: bottom - top };
  }

  #resize() {
    if (!this.#columns) return;
    const ratio = window.devicePixelRatio || 1;
    const width = this.#canvas.clientWidth;
    const row = Math.max(4, Math.min(18, width / this.#columns, 420 / this.#layers.length));
    this.#canvas.style.height = `${Math.round(row * this.#layers.length)}px`;
    this.#canvas.width = Math.max(this.#columns, Math.round(width * ratio));
    this.#canvas.height = Math.round(row * this.#layers.length * ratio);
    this.#draw();
  }

  #recolor() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["disk", "disk-line", "cached", "pinned", "flash", "text"]) {
      this.#colors[name] = style.getPropertyValue(`--${name}`).trim();
    }
    this.#draw();
  }

  #draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = requestAnimationFrame((now) => this.#paint(now));
  }

  #paint(now) {
    if (!this.#columns) return;
    const context = this.#canvas.getContext("2d", { willReadFrequently: true });
    const colors = this.#colors;
    let fading = false;
    context.fillStyle = colors.disk;
    context.fillRect(0, 0, this.#canvas.width, this.#canvas.height);
    for (let y = 0; y < this.#layers.length; y += 1) {
      for (let x = 0; x < this.#columns; x += 1) {
        const { left, top, width, height } = this.cell(y, x);
        const gap = width > 3 && height > 3 ? 1 : 0;
        const place = this.#state[y][x];
        if (place === ".") {
          if (gap) {
            context.strokeStyle = colors["disk-line"];
            context.lineWidth = 1;
            context.strokeRect(left + 0.5, top + 0.5, width - 2, height - 2);
          }
        } else {
          context.fillStyle = place === "p" ? colors.pinned : colors.cached;
          context.fillRect(left, top, width - gap, height - gap);
        }
        const age = now - this.#lit[y * this.#columns + x];
        if (this.#still.matches ? this.#lit[y * this.#columns + x] > 0 : age < FADE_MS) {
          context.globalAlpha = this.#still.matches ? 1 : Math.min(1, 1 - age / FADE_MS);
          context.fillStyle = colors.flash;
          context.fillRect(left, top, width - gap, height - gap);
          context.globalAlpha = 1;
          fading = fading || !this.#still.matches;
        }
      }
    }
    if (this.#cursor) {
      const { left, top, width, height } = this.cell(...this.#cursor);
      context.strokeStyle = colors.text;
      context.lineWidth = 2;
      context.strokeRect(left, top, width, height);
    }
    if (fading) this.#draw();
  }

  #key(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const step = steps[event.key];
    if (!step || !this.#columns) return;
    event.preventDefault();
    const [y, x] = this.#cursor ?? [0, -step[1]];
    const rows = this.#layers.length;
    this.#name([(y + step[0] + rows) % rows, (x + step[1] + this.#columns) % this.#columns]);
    this.#draw();
  }

  #point(event) {
    if (!this.#columns) return;
    const box = this.#canvas.getBoundingClientRect();
    const y = Math.floor(((event.clientY - box.top) / box.height) * this.#layers.length);
    const x = Math.floor(((event.clientX - box.left) / box.width) * this.#columns);
    if (y >= 0 && x >= 0 && y < this.#layers.length && x < this.#columns) {
      this.#name([y, x]);
      this.#draw();
    }
  }

  #name(cursor) {
    const left = this.#cursor && !cursor;
    this.#cursor = cursor;
    if (cursor && this.#state.length) {
      const [y, x] = cursor;
      const times = this.#used[y][x];
      this.#say(`Layer ${this.#layers[y]}, expert ${x}: ${PLACES[this.#state[y][x]]}, used ${times} ${times === 1 ? "time" : "times"}`);
    } else {
      this.#say("\u00a0");
    }
    if (left) this.#draw();
  }

  #say(text) {
    if (this.#note.textContent !== text) this.#note.textContent = text;
  }
}
