// Hands the trace to the Perfetto UI, which is another origin: asked until it answers, then one message. The UI starts
// once it is known which tracks to pin above all others: it takes that only in its address.
const frame = document.getElementById("timeline");
const state = document.getElementById("timeline-state");
const {page, ui, trace, name} = frame.dataset;
const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

const start = ({tracks = []}) => new Promise((resolve) => {
  const command = {id: "dev.perfetto.PinTracksByRegex", args: [`^(${tracks.map(escaped).join("|")})`]};
  frame.src = tracks.length ? `${page}&startupCommands=${encodeURIComponent(JSON.stringify([command]))}` : page;
  const asking = setInterval(() => frame.contentWindow.postMessage("PING", ui), 200);
  addEventListener("message", (event) => {
    if (event.origin !== ui || event.source !== frame.contentWindow || event.data !== "PONG") return;
    clearInterval(asking);
    resolve();
  });
});

try {
  const answer = await fetch(trace, {credentials: "same-origin"});
  if (!answer.ok) throw new Error(await answer.text());
  const focus = JSON.parse(answer.headers.get("Kineto-Focus") ?? "{}");
  const [buffer] = await Promise.all([answer.arrayBuffer(), start(focus)]);
  frame.contentWindow.postMessage({perfetto: {buffer, title: name, keepApiOpen: true}}, ui);
  if (focus.end_s) {
    const range = {timeStart: focus.start_s, timeEnd: focus.end_s, viewPercentage: 0.9};
    frame.contentWindow.postMessage({perfetto: range}, ui);
  }
  state.textContent = `${name} is open below.`;
} catch (error) {
  state.textContent = `The trace could not be loaded: ${error.message}`;
}
