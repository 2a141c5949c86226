// One model: its environment with the search drawn over it, its novelty, what it imagines, its costs.

const FAN_MS = 500; // the fan appears over this time
const FAR = 3; // distances above it are marked: 1 is usual among training frames
const RISKY = 0.3; // as in README's rule

export class Lane {
  constructor(player) {
    this.player = player;
    this.root = document.getElementById("lane").content.firstElementChild.cloneNode(true);
    this.find = (selector) => this.root.querySelector(selector);
    this.canvas = this.find("canvas.view");
    this.canvas.setAttribute("aria-label", `The environment of ${player.name}. Arrow keys move the goal.`);
    this.find("h2").textContent = player.method;
    this.find("h2").title = `${player.name}, ${player.parameters.toLocaleString("en")} parameters`;
    this.image = new Image();
    this.image.onload = () => this.draw();
    this.goal = null;
    this.handles = [];
    this.goalHandles = [];
    this.clearPlan();
    this.find(".imagined .hint").textContent = player.without_frames || "nearest training frame, distance";
  }

  // Of an attempt that is over
  clear() {
    this.clearPlan();
    this.known = {};
    this.find(".imagined ol").replaceChildren();
    this.find(".numbers").textContent = "";
    this.meter(".risk", 0, "–", false, "");
    this.curve([]);
  }

  clearPlan() {
    this.path = [];
    this.fan = [];
    this.planned = 0;
  }

  see(seen) {
    this.image.src = seen.image;
    this.handles = seen.handles;
    if (seen.now !== undefined) this.showNovelty(seen.now);
  }

  status(text, kind = "") {
    const status = this.find(".status");
    status.textContent = text;
    status.className = `status ${kind}`;
  }

  plan(event) {
    Object.assign(this, { path: event.path, fan: event.fan, planned: performance.now() });
    const list = this.find(".imagined ol");
    list.replaceChildren(...event.imagined.map((one, i) => this.thumb(one, i + 1)));
    list.style.gridTemplateColumns = `repeat(${Math.min(8, event.imagined.length) || 1}, minmax(0, 1fr))`;
    if (event.novelty) this.showPlanNovelty(event.novelty);
    this.showRisk(event);
    const distances = `${event.start_cost?.toFixed(1)} now, ${event.cost?.toFixed(1)} at the end`;
    this.find(".numbers").textContent = `${distances}, ${event.ms.toFixed(0)} ms`;
    this.find(".numbers").dataset.ms = event.ms;
    this.curve(event.costs);
    this.animate();
  }

  thumb(one, number) {
    const item = document.createElement("li");
    const image = new Image();
    image.src = one.image;
    image.alt = `imagined after ${number} action chunks`;
    const text = document.createElement("span");
    text.textContent = one.distance === null ? "–" : one.distance.toFixed(1);
    item.append(image, text);
    item.classList.toggle("far", one.distance === null || one.distance > FAR);
    return item;
  }

  // Percentiles of the frame and, at rest, of the goal: {frame: {latent, image}, goal: {latent, image}}
  showNovelty(now) {
    if (!now) return this.gauge(null);
    this.known = { ...this.known, ...now };
    const values = Object.entries(this.known).flatMap(([what, each]) =>
      Object.entries(each).map(([kind, value]) => [what, kind, value]));
    this.gauge(values);
  }

  showPlanNovelty(n) {
    const [frame, goal] = [{ latent: n.frame }, { latent: n.goal }];
    if (n.frame_image !== undefined) Object.assign(frame, { image: n.frame_image });
    if (n.goal_image !== undefined) Object.assign(goal, { image: n.goal_image });
    this.showNovelty({ frame, goal, end: { latent: n.end } });
  }

  gauge(values) {
    if (!values) {
      this.meter(".novelty", 0, "unknown", false, "The run has no bank: `atlas bank RUN` adds it.");
      return;
    }
    const most = Math.max(...values.map(([, , value]) => value ?? 100));
    const flagged = most > this.player.flagged;
    const listed = (wanted) => values.filter(([, kind]) => kind === wanted)
      .map(([what, , value]) => `${what} ${value === null ? "–" : value.toFixed(0)}`).join(", ");
    const details = ["latent", "image"].filter(listed).map((kind) => `${kind}: ${listed(kind)}`).join(" · ");
    this.meter(".novelty", most, `${most.toFixed(0)}${flagged ? ": unlike the training data" : ""}`, flagged, details);
  }

  // What the plan is expected to leave, and what it leads through
  showRisk({ risk, remaining, strayed, crossed }) {
    if (risk === null) return this.meter(".risk", 100, "–", false, "");
    const parts = { "distance that remains": remaining, "left the training data": strayed, "crossed a change": crossed };
    const details = Object.entries(parts).filter(([, value]) => value !== null)
      .map(([what, value]) => `${what}: ${Math.min(1, value).toFixed(2)}`).join(" · ");
    const text = `${risk.toFixed(2)}${risk > RISKY ? ": may fail" : ""}`;
    this.meter(".risk", 100 * risk, text, risk > RISKY, details);
  }

  meter(which, percent, text, flagged, details) {
    const meter = this.find(which);
    meter.classList.toggle("flagged", flagged);
    meter.dataset.value = percent;
    meter.querySelector(".fill").style.width = `${percent}%`;
    meter.querySelector(".value").textContent = text;
    meter.querySelector(".details").textContent = details;
  }

  curve(costs) {
    const canvas = this.find("canvas.curve"), pen = canvas.getContext("2d");
    const { width, height } = canvas, style = getComputedStyle(document.body);
    pen.clearRect(0, 0, width, height);
    const known = costs.filter((cost) => cost !== null);
    if (known.length < 2) return;
    const top = Math.max(...known), low = Math.min(0, ...known);
    const x = (i) => 6 + (i * (width - 12)) / (costs.length - 1);
    const y = (cost) => height - 8 - ((cost - low) / (top - low || 1)) * (height - 18);
    pen.strokeStyle = style.getPropertyValue("--line");
    pen.beginPath();
    pen.moveTo(0, y(low));
    pen.lineTo(width, y(low));
    pen.stroke();
    pen.strokeStyle = pen.fillStyle = style.getPropertyValue("--accent");
    pen.lineWidth = 3;
    pen.beginPath();
    costs.forEach((cost, i) => pen.lineTo(x(i), y(cost ?? top)));
    pen.stroke();
    costs.forEach((cost, i) => {
      pen.beginPath();
      pen.arc(x(i), y(cost ?? top), 4, 0, 7);
      pen.fill();
    });
  }

  animate() {
    const step = () => {
      this.draw();
      if (performance.now() - this.planned < FAN_MS) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  draw() {
    const pen = this.canvas.getContext("2d"), size = this.canvas.width;
    pen.imageSmoothingEnabled = true;
    if (this.image.naturalWidth) pen.drawImage(this.image, 0, 0, size, size);
    if (this.goal?.naturalWidth) {
      pen.globalAlpha = 0.22;
      pen.drawImage(this.goal, 0, 0, size, size);
      pen.globalAlpha = 1;
    }
    const shown = Math.min(1, (performance.now() - this.planned) / FAN_MS);
    for (const { share, path } of this.fan) {
      if (share > shown) continue;
      const mix = [[154, 224], [167, 138], [199, 30]].map(([a, b]) => Math.round(a + (b - a) * share));
      this.line(pen, path, `rgba(${mix}, ${0.3 + 0.35 * share})`, 2);
    }
    if (this.path.length) this.line(pen, this.path, "#2f6fed", 5);
    for (const handle of this.goalHandles) this.ring(pen, handle);
  }

  line(pen, path, colour, width) {
    const size = this.canvas.width;
    Object.assign(pen, { strokeStyle: colour, lineWidth: width, lineJoin: "round", lineCap: "round" });
    pen.beginPath();
    for (const [x, y] of path) pen.lineTo(x * size, y * size);
    pen.stroke();
  }

  ring(pen, handle) {
    const size = this.canvas.width, [x, y] = [handle.x * size, handle.y * size];
    Object.assign(pen, { strokeStyle: "#1c9a57", lineWidth: handle.chosen ? 6 : 3 });
    pen.beginPath();
    pen.arc(x, y, 26, 0, 7);
    pen.stroke();
    if (handle.angle !== null) {
      pen.beginPath();
      pen.moveTo(x, y);
      pen.lineTo(x - 44 * Math.sin(handle.angle), y + 44 * Math.cos(handle.angle));
      pen.stroke();
    }
  }
}
