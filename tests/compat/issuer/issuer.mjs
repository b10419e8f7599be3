// An OpenID Connect issuer of oidc-provider on https of loopback, for programs that show a secret.
//
// issuer.mjs PORT CERTIFICATE KEY ACCOUNTS: accounts are JSON, {name: [group, ...]}; the secret of each is
// "secret of NAME".  A token is for the audience that stands before the colon of its resource
// "urn:AUDIENCE:ALGORITHM:SECONDS".  Prints "ready"; a line "rotate" adds new keys, which sign from then on,
// and prints "rotated".

import { generateKeyPairSync } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { createServer } from 'node:https';
import { createInterface } from 'node:readline';

import Provider from 'oidc-provider';

const [port, certificate, key, said] = process.argv.slice(2);
const accounts = JSON.parse(said);
const name = `https://127.0.0.1:${port}`;
let keys = [];
let serve;

function makeKeys() {
  const pairs = [
    generateKeyPairSync('rsa', { modulusLength: 2048 }),
    generateKeyPairSync('ec', { namedCurve: 'P-256' }),
    generateKeyPairSync('ed25519'),
  ];
  keys = [...pairs.map((pair) => pair.privateKey.export({ format: 'jwk' })), ...keys];
}

function use() {
  const provider = new Provider(name, {
    jwks: { keys },
    clients: Object.keys(accounts).map((one) => ({
      client_id: one,
      client_secret: `secret of ${one}`,
      grant_types: ['client_credentials'],
      redirect_uris: [],
      response_types: [],
    })),
    extraTokenClaims: (ctx, token) => ({ groups: accounts[token.clientId] }),
    features: {
      clientCredentials: { enabled: true },
      devInteractions: { enabled: false },
      resourceIndicators: {
        enabled: true,
        getResourceServerInfo: (ctx, resource) => {
          const [, audience, alg, seconds] = resource.split(':');
          return {
            audience, scope: '', accessTokenFormat: 'jwt', accessTokenTTL: Number(seconds), jwt: { sign: { alg } },
          };
        },
      },
    },
  });
  serve = provider.callback();
}

makeKeys();
use();
const files = { cert: readFileSync(certificate), key: readFileSync(key) };
createServer(files, (request, response) => serve(request, response)).listen(Number(port), '127.0.0.1', () => {
  console.log('ready');
});
createInterface({ input: process.stdin }).on('line', (line) => {
  if (line === 'rotate') {
    makeKeys();
    use();
    console.log('rotated');
  }
}).on('close', () => process.exit(0));
