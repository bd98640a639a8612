// The certified provider `oidc-provider`, on a port of 127.0.0.1: `node provider.mjs PORT GATEWAY`.
//
// Its login takes each name; the groups of `ada-platform` are `platform`. POST /rotate adds a key and
// signs with it. Its access tokens for the resource `urn:sameway` are JWTs.
import { generateKeyPairSync, randomUUID } from 'node:crypto'
import { createServer } from 'node:http'
import { Provider } from 'oidc-provider'

const [port, gateway] = process.argv.slice(2)
const keys = []
let answer

function groupsOf(name) {
  return [name.split('-').at(-1), 'everybody']
}

function rotate() {
  const { privateKey } = generateKeyPairSync('rsa', { modulusLength: 2048 })
  keys.unshift({ ...privateKey.export({ format: 'jwk' }), kid: randomUUID(), use: 'sig', alg: 'RS256' })
  answer = new Provider(`http://127.0.0.1:${port}`, {
    jwks: { keys },
    cookies: { keys: ['a key for tests'] },
    clients: [{
      client_id: 'sameway',
      client_secret: 'a-secret:with%,+and&=/of-tests',
      redirect_uris: [`${gateway}/admin/sign-in/callback`],
      post_logout_redirect_uris: [`${gateway}/admin/login`],
      backchannel_logout_uri: `${gateway}/admin/sign-in/logout`,
      backchannel_logout_session_required: true,
    }, {
      client_id: 'laptop',
      redirect_uris: [`http://127.0.0.1:${port}/done`],
      token_endpoint_auth_method: 'none',
      application_type: 'native',
    }],
    scopes: ['openid', 'email', 'groups'],
    claims: { openid: ['sub'], email: ['email'], groups: ['groups'] },
    conformIdTokenClaims: false,
    fetch: (url, { dispatcher: _, ...options }) => fetch(url, options), // its own refuses 127.0.0.1
    pkce: { required: () => true },
    findAccount: (_, name) => ({
      accountId: name,
      claims: () => ({ sub: name, email: `${name}@example.com`, groups: groupsOf(name) }),
    }),
    extraTokenClaims: (_, token) => ({
      email: `${token.accountId}@example.com`,
      groups: groupsOf(token.accountId),
    }),
    features: {
      backchannelLogout: { enabled: true },
      rpInitiatedLogout: { enabled: true },
      resourceIndicators: {
        enabled: true,
        getResourceServerInfo: () => ({
          scope: 'llm',
          audience: 'sameway-api',
          accessTokenFormat: 'jwt',
          accessTokenTTL: 300,
          jwt: { sign: { alg: 'RS256' } },
        }),
      },
    },
    ttl: { Session: 3600, Interaction: 600, Grant: 3600, IdToken: 300 },
  }).callback()
}

rotate()
createServer((request, response) => {
  if (request.method === 'POST' && request.url === '/rotate') {
    rotate()
    response.end()
  } else {
    answer(request, response)
  }
}).listen(Number(port), '127.0.0.1', () => console.log('listening'))
