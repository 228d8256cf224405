// Load of a decode service over k3svc.v1, from k6: closed loop by default, open loop with RATE.
//
//     k6 run -e TARGET=127.0.0.1:50051 -e VUS=8 -e REQUESTS=100 benchmarks/k6/generate.js
//
// VUS requests at once, or RATE a second for DURATION; INPUT_LEN and OUTPUT_LEN tokens each; SUMMARY names a file for
// the figures as JSON. TTFT_P95_MS and TPOT_P95_MS make it fail (exit code 99) when a percentile is above.
import { Client, Stream } from 'k6/net/grpc';
import { Counter, Trend } from 'k6/metrics';

const setting = (name, otherwise) => (__ENV[name] === undefined ? otherwise : Number(__ENV[name]));
const target = __ENV.TARGET || '127.0.0.1:50051';
const inputLen = setting('INPUT_LEN', 256);
const outputLen = setting('OUTPUT_LEN', 64);
const vocabSize = setting('VOCAB_SIZE', 4096);
const vus = setting('VUS', 8);

const ttft = new Trend('ttft', true);
const tpot = new Trend('tpot', true);
const e2el = new Trend('e2el', true);
const tokens = new Counter('output_tokens');
const wall = new Trend('wall_clock_ms'); // when requests were sent and ended: min and max are the time under load
const failures = new Counter('failed_requests');

const closed = { executor: 'shared-iterations', vus: vus, iterations: setting('REQUESTS', 100), maxDuration: '1h' };
const open = {
  executor: 'constant-arrival-rate',
  rate: setting('RATE', 1),
  timeUnit: '1s',
  duration: __ENV.DURATION || '30s',
  preAllocatedVUs: vus,
  maxVUs: 1024,
};

const thresholds = { failed_requests: ['count<1'] };
if (__ENV.TTFT_P95_MS) thresholds.ttft = [`p(95)<${__ENV.TTFT_P95_MS}`];
if (__ENV.TPOT_P95_MS) thresholds.tpot = [`p(95)<${__ENV.TPOT_P95_MS}`];

export const options = {
  scenarios: { load: __ENV.RATE === undefined ? closed : open },
  summaryTrendStats: ['avg', 'min', 'med', 'p(90)', 'p(95)', 'p(99)', 'max', 'count'],
  thresholds: thresholds,
};

const client = new Client();
client.load(['../../protos'], 'k3svc/v1/decode_service.proto');
let isConnected = false;

export default function () {
  if (!isConnected) {
    client.connect(target, { plaintext: true });
    isConnected = true;
  }
  const prompt = Array.from({ length: inputLen }, () => Math.floor(Math.random() * vocabSize));
  const started = Date.now();
  wall.add(started);
  const stream = new Stream(client, 'k3svc.v1.DecodeService/Generate');
  let first = 0;
  let last = 0;
  let count = 0;
  let atFirst = 0;
  stream.on('data', (message) => {
    const got = message.delta && message.delta.tokenIds ? message.delta.tokenIds.length : 0;
    if (got === 0) return;
    last = Date.now();
    count += got;
    if (first === 0) {
      first = last;
      atFirst = got;
    }
  });
  stream.on('error', () => failures.add(1));
  stream.on('end', () => {
    wall.add(Date.now());
    if (count === 0) return;
    ttft.add(first - started);
    e2el.add(last - started);
    tokens.add(count);
    if (count > atFirst) tpot.add((last - first) / (count - atFirst));
  });
  stream.write({
    tokens: { ids: prompt },
    sampling: { temperature: 1.0 },
    stop: { max_tokens: outputLen, ignore_eos: true },
  });
  stream.end();
}

export function handleSummary(data) {
  const shown = {};
  for (const name of ['ttft', 'tpot', 'e2el', 'output_tokens', 'failed_requests', 'iterations', 'wall_clock_ms']) {
    if (data.metrics[name]) shown[name] = data.metrics[name].values;
  }
  const text = JSON.stringify(shown, null, 1) + '\n';
  return __ENV.SUMMARY ? { [__ENV.SUMMARY]: text } : { stdout: text };
}
