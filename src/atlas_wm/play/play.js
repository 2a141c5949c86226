// The page: messages to the server ({do: ...}), events from it ({event: ...}), pointer and keys.
import { Lane } from "./lane.js";

const $ = (id) => document.getElementById(id);
const GRAB = 0.09; // share of the image: how near a part the pointer takes it
const SEND_MS = 50; // between two messages while something is dragged
const KEY_STEP = 0.02;

let socket = null;
let lanes = [];
let before = 0; // rows from the start to a goal of the dataset
let running = false;
let over = false;
let goal = { handles: [] };
let chosen = 0; // which part of the goal keys and clicks move
let dragged = null; // {which, handle}
let scene = {}; // changed variations
let page = 0;
const goalImage = new Image();
goalImage.onload = () => {
  drawGoal();
  lanes.forEach((lane) => lane.draw());
};

const send = (message) => socket?.readyState === WebSocket.OPEN && socket.send(JSON.stringify(message));

function throttled(act) {
  let last = 0, timer = 0;
  return (...given) => {
    clearTimeout(timer);
    const wait = Math.max(0, last + SEND_MS - performance.now());
    timer = setTimeout(() => { last = performance.now(); act(...given); }, wait);
  };
}
const sendSoon = { move: throttled(send), vary: throttled(send) };

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

// Events of the server

const events = {
  hello(event) {
    before = event.steps_before;
    lanes = event.players.map((player) => new Lane(player));
    $("lanes").replaceChildren(...lanes.map((lane) => lane.root));
    $("lanes").classList.toggle("one", lanes.length === 1);
    $("lanes").classList.toggle("no-paths", !event.paths);
    lanes.forEach((lane) => listen(lane.canvas, () => lane.handles));
    const models = event.players.map((player) => player.name).join(" and ");
    $("about").textContent = `${event.task}: ${models}`;
    $("earlier-label").hidden = !before;
    makeVariations(event.variations);
    for (const id of ["go", "reset", "offer"]) $(id).disabled = false;
  },
  scene(event) {
    running = event.running;
    goal = event.goal;
    goalImage.src = goal.image;
    over = false;
    event.lanes.forEach((seen, i) => {
      lanes[i].goal = goalImage;
      if (running) lanes[i].clearPlan();
      else lanes[i].clear();
      lanes[i].see(seen);
      if (!running) lanes[i].status("ready");
    });
    makeParts();
    showHandles();
    $("how").textContent = ["Choose a frame of the dataset below.",
      `Click in the image to set it. Drag the ${goal.handles[0]?.name} to move the start.`,
      "Drag its parts, the green rings. Drag the parts of the scene to move the start."][Math.min(2, goal.handles.length)];
    buttons();
  },
  plan(event) {
    lanes[event.lane].plan(event);
    lanes[event.lane].status(`planned in ${event.ms.toFixed(0)} ms`);
  },
  step(event) {
    const lane = lanes[event.lane];
    lane.see(event);
    if (event.reached) lane.status(`reached in ${event.step} steps`, "reached");
    else lane.status(`step ${event.step}`);
    lane.last = event;
  },
  end() {
    running = false;
    over = true;
    for (const lane of lanes) if (!lane.last?.reached) lane.status(`not reached in ${lane.last?.step} steps`, "missed");
    buttons();
  },
  frames(event) {
    $("frames").replaceChildren(...event.frames.map(({ row, image }) => {
      const button = document.createElement("button");
      const thumb = new Image();
      thumb.src = image;
      thumb.alt = `row ${row}`;
      button.type = "button";
      button.append(thumb);
      button.onclick = () => {
        notice("");
        send({ do: "frame", row, before: $("earlier").checked ? before : 0 });
      };
      return button;
    }));
    $("offer").textContent = "Other frames";
    $("offer").disabled = false;
  },
  error(event) {
    notice(event.text);
    $("offer").disabled = !lanes.length;
    if (event.final) for (const id of ["go", "reset", "offer"]) $(id).disabled = true;
  },
};

function buttons() {
  $("go").textContent = running ? "Stop" : over ? "Again" : "Go";
}

function go() {
  if ($("go").disabled) return;
  running = !running;
  notice("");
  send({ do: running ? "go" : "stop" });
  if (running) over = false;
  else lanes.forEach((lane) => lane.status("stopped"));
  buttons();
}

function reset() {
  notice("");
  send({ do: "reset" });
}

// Moving parts of the goal and of the start

function move(which, handle, x, y, angle = null) {
  const [cx, cy] = [x, y].map((value) => Math.min(1, Math.max(0, value)));
  if (which === "goal") Object.assign(handle, { x: cx, y: cy });
  if (angle !== null) handle.angle = angle;
  showHandles();
  sendSoon.move({ do: "move", which, name: handle.name, x: cx, y: cy, ...(handle.angle === null ? {} : { angle: handle.angle }) });
}

function listen(canvas, startHandles) {
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  };
  canvas.addEventListener("pointerdown", (event) => {
    const [x, y] = at(event);
    const near = (which) => (handle) => ({ which, handle, gap: Math.hypot(handle.x - x, handle.y - y) });
    const [first] = [...goal.handles.map(near("goal")), ...(running ? [] : startHandles().map(near("start")))]
      .filter(({ gap }) => gap < GRAB).sort((a, b) => a.gap - b.gap);
    if (!goal.handles.length) return;
    canvas.setPointerCapture(event.pointerId);
    dragged = first ?? { which: "goal", handle: goal.handles[chosen] };
    if (dragged.which === "goal") chosen = goal.handles.indexOf(dragged.handle);
    if (!first) move("goal", dragged.handle, x, y);
    makeParts();
    notice("");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (dragged) move(dragged.which, dragged.handle, ...at(event));
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { dragged = null; });
  canvas.addEventListener("wheel", (event) => {
    if (goal.handles[chosen]?.angle == null) return;
    event.preventDefault();
    turn(Math.sign(event.deltaY) * 0.1);
  }, { passive: false });
}

function turn(by) {
  const handle = goal.handles[chosen];
  if (handle?.angle != null) move("goal", handle, handle.x, handle.y, handle.angle + by);
}

function makeParts() {
  chosen = Math.min(chosen, Math.max(0, goal.handles.length - 1));
  const parts = goal.handles.length > 1 ? goal.handles.map((handle, i) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = handle.name;
    button.className = i === chosen ? "chosen" : "";
    button.onclick = () => { chosen = i; makeParts(); showHandles(); };
    return button;
  }) : [];
  if (goal.handles[chosen]?.angle != null) {
    for (const [text, by] of [["⟲", -0.15], ["⟳", 0.15]]) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.title = "turn";
      button.onclick = () => turn(by);
      parts.push(button);
    }
  }
  $("parts").replaceChildren(...parts);
}

function showHandles() {
  goal.handles.forEach((handle, i) => { handle.chosen = i === chosen && goal.handles.length > 1; });
  lanes.forEach((lane) => { lane.goalHandles = goal.handles; lane.draw(); });
  drawGoal();
}

function drawGoal() {
  const canvas = $("goal");
  if (goalImage.naturalWidth) canvas.getContext("2d").drawImage(goalImage, 0, 0, canvas.width, canvas.height);
}

// The scene

function makeVariations(variations) {
  $("scene").hidden = !variations.length;
  $("variations").replaceChildren(...variations.map((one) => {
    const label = document.createElement("label"), input = document.createElement("input");
    const byte = (v) => Math.round((v / one.high) * 255).toString(16).padStart(2, "0");
    const hex = (values) => "#" + values.slice(0, 3).map(byte).join("");
    const named = document.createElement("span"), shown = () => {
      const name = one.name.replace(".", " ").replace("color", "colour");
      named.textContent = one.kind === "colour" ? name : `${name} ${input.value}`;
    };
    input.id = one.name;
    input.title = `atlas eval --vary ${one.name}=…`;
    if (one.kind === "colour") Object.assign(input, { type: "color", value: hex(one.value) });
    else Object.assign(input, { type: "range", min: one.low, max: one.high, value: one.value[0] });
    input.oninput = () => {
      shown();
      scene[one.name] = one.kind === "colour"
        ? one.value.map((_, i) => (parseInt(input.value.slice(1 + 2 * (i % 3), 3 + 2 * (i % 3)), 16) / 255) * one.high)
        : one.value.map(() => Number(input.value));
      sendSoon.vary({ do: "vary", values: scene });
    };
    input.restore = () => {
      input.value = one.kind === "colour" ? hex(one.value) : one.value[0];
      shown();
    };
    shown();
    label.append(named, input);
    return label;
  }));
}

$("restore").onclick = () => {
  scene = {};
  for (const input of $("variations").querySelectorAll("input")) input.restore();
  send({ do: "vary", values: {} });
};
$("offer").onclick = () => {
  $("offer").disabled = true;
  $("offer").textContent = "Reading …";
  send({ do: "frames", page: page++ });
};
$("go").onclick = go;
$("reset").onclick = reset;

document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, button, summary") && !(event.key === "r")) return;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  const which = event.shiftKey ? "start" : "goal";
  const handle = which === "goal" ? goal.handles[chosen] : lanes[0]?.handles[0];
  if (arrows && handle) {
    if (which === "start") Object.assign(handle, { x: handle.x + arrows[0] * KEY_STEP, y: handle.y + arrows[1] * KEY_STEP });
    const [dx, dy] = which === "start" ? [0, 0] : arrows;
    move(which, handle, handle.x + dx * KEY_STEP, handle.y + dy * KEY_STEP);
  } else if (event.key === " ") go();
  else if (event.key === "r") reset();
  else if (event.key === "n") { chosen = (chosen + 1) % Math.max(1, goal.handles.length); makeParts(); showHandles(); }
  else if (event.key === "q") turn(-0.1);
  else if (event.key === "e") turn(0.1);
  else return;
  event.preventDefault();
});

function connect() {
  const url = new URL("live" + location.search, location.href);
  url.protocol = url.protocol.replace("http", "ws");
  socket = new WebSocket(url);
  socket.onmessage = ({ data }) => {
    const event = JSON.parse(data);
    events[event.event](event);
  };
  socket.onclose = () => {
    for (const id of ["go", "reset", "offer"]) $(id).disabled = true;
    if ($("notice").hidden) notice("The server has stopped: start `atlas play` again and reload the page.");
  };
}
listen($("goal"), () => []);
connect();
