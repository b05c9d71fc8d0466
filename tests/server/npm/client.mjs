// What OpenAI's own JavaScript client makes of the service; prints one JSON object for the test to read.
import OpenAI from 'openai';

const client = new OpenAI({ baseURL: process.argv[2], apiKey: 'none', maxRetries: 0, timeout: 120_000 });
const told = {};
const messages = [{ role: 'user', content: 'Hello' }];
const short = { model: 'lm', messages, max_tokens: 8, temperature: 0 };

told.models = (await client.models.list()).data.map((model) => model.id);

const whole = await client.chat.completions.create(short);
told.chat = { text: whole.choices[0].message.content, usage: whole.usage.completion_tokens };

told.stream = { text: '', usage: null };
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...short, ...options })) {
  told.stream.text += chunk.choices[0]?.delta?.content ?? '';
  told.stream.usage = chunk.usage?.completion_tokens ?? told.stream.usage;
}

const spoken = await client.chat.completions.create({
  model: 'omni',
  messages,
  max_tokens: 4,
  modalities: ['text', 'audio'],
  audio: { voice: process.argv[3], format: 'wav' },
});
const sound = Buffer.from(spoken.choices[0].message.audio.data, 'base64');
told.audio = { head: sound.subarray(0, 4).toString('latin1'), bytes: sound.length };

const left = await client.chat.completions.create({ ...short, max_tokens: 1500, ignore_eos: true, stream: true });
for await (const _ of left) break; // leaving the loop aborts the request

const drawn = await client.images.generate({ model: 'draw', prompt: 'a hat', size: '64x48', steps: 2, seed: 1 });
const picture = Buffer.from(drawn.data[0].b64_json, 'base64');
told.image = { head: picture.subarray(1, 4).toString('latin1'), size: drawn.size };

told.imageEvents = [];
const pictures = { model: 'draw', prompt: 'a hat', size: '64x48', steps: 2, stream: true, partial_images: 1 };
for await (const event of await client.images.generate(pictures)) told.imageEvents.push(event.type);

told.errors = [];
for (const change of [{ temperature: -1 }, { model: 'nobody' }, { no_such_field: 1 }]) {
  try {
    await client.chat.completions.create({ ...short, ...change });
    told.errors.push(null);
  } catch (error) {
    told.errors.push({ kind: error.constructor.name, status: error.status, param: error.param, code: error.code });
  }
}
console.log(JSON.stringify(told));
