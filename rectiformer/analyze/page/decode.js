// Arrays of a record: base64 of gzip of little-endian numbers.

const TYPES = { u1: Uint8Array, u4: Uint32Array, f4: Float32Array };

// The numbers of an ARRAY {dtype, shape: [n], data}.
export async function decode({ dtype, shape, data }) {
  const Numbers = TYPES[dtype];
  if (!Numbers) throw new Error(`array of unknown dtype ${dtype}`);
  const packed = unbase64(data);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  if (buffer.byteLength !== shape[0] * Numbers.BYTES_PER_ELEMENT) {
    throw new Error(`array of ${shape[0]} ${dtype} has ${buffer.byteLength} bytes`);
  }
  return new Numbers(buffer);
}

function unbase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i += 1) bytes[i] = binary.charCodeAt(i);
  return bytes;
}
