import base64

import pytest

from kvtier_sdk import ConfigError, TierSpec

KEY = base64.b64encode(bytes(32)).decode()


def config(url: str, **options: object):
    return TierSpec.from_url(url, **options).config


def test_everything_in_a_url():
    options = config("s3://kv")
    assert (options.prefix, options.sign_payload, options.tls_verify) == ("kvtier", False, True)
    options = config(
        "s3://kv/a/b/?endpoint=https://h:9000/&region=eu-west-1&addressing=virtual"
        "&access_key_id=id&secret_access_key=s%2Fk%2B&session_token=tok&read_timeout=1500ms"
    )
    assert (options.bucket, options.prefix) == ("kv", "a/b")
    assert (options.endpoint, options.addressing) == ("https://h:9000", "virtual")
    assert options.secret_access_key.get_secret_value() == "s/k+"
    assert options.session_token.get_secret_value() == "tok"
    assert options.read_timeout_s == 1.5
    assert "s/k+" not in repr(options)
    assert "tok" not in repr(options).replace("token", "")
    other = config("s3://id:s%2Fk@kv")
    assert other.access_key_id.get_secret_value() == "id"
    assert other.secret_access_key.get_secret_value() == "s/k"
    assert config("s3:", bucket="B_ucket", prefix="").prefix == ""


def test_what_is_said_about_encryption():
    assert config("s3://kv?sse=AES256").write_headers == {"x-amz-server-side-encryption": "AES256"}
    own = config("s3://kv", sse_secret_key=KEY)
    assert (
        own.write_headers
        == own.read_headers
        == {
            "x-amz-server-side-encryption-customer-algorithm": "AES256",
            "x-amz-server-side-encryption-customer-key": KEY,
            "x-amz-server-side-encryption-customer-key-md5": "cLyPS3KoaSFGi/joRB3OUQ==",
        }
    )
    assert KEY not in repr(own)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("s3:", r"option 'bucket' is missing"),
        ("s3:///prefix", r"option 'bucket' is missing"),
        ("s3://kv:9000", r"a bucket has no port; write 's3://bucket/prefix\?endpoint=http://host"),
        ("s3://kv/a?prefix=b", r"'prefix' is given in the URL twice"),
        ("s3://kv?bucket=b", r"'bucket' is given in the URL twice"),
        ("s3://kv?endpoint=h:9000", r"'h:9000' is not an endpoint; write for example 'https://"),
        ("s3://kv?endpoint=ftp://h", r"option 'endpoint'"),
        ("s3://kv?endpoint=http://h:x", r"option 'endpoint'"),
        ("s3://kv/a/../b", r"option 'prefix'"),
        ("s3://kv?access_key_id=a", r"'access_key_id' is given without 'secret_access_key'"),
        ("s3://kv?secret_access_key=hunter2", r"'secret_access_key' is given without 'access"),
        ("s3://kv?session_token=hunter2", r"'session_token' is given without 'access_key_id'"),
        ("s3://id:hunter2@kv?profile=x", r"'profile' cannot be used beside 'access_key_id'"),
        ("s3://kv?addressing=host", r"option 'addressing' is 'host' but should be 'auto', 'path'"),
        ("s3://kv?sse=aes", r"option 'sse' is 'aes' but should be 'AES256' or 'aws:kms'"),
        ("s3://kv?sse_kms_key_id=k", r"'sse_kms_key_id' is given without 'sse' being 'aws:kms'"),
        ("s3://kv?sse_secret_key=short", r"'sse_secret_key' should be 32 bytes in base64"),
        (f"s3://kv?sse=AES256&sse_secret_key={KEY}", r"'sse' cannot be used beside"),
        (f"s3://kv?endpoint=http://h&sse_secret_key={KEY}", r"without TLS"),
        (f"s3://kv?endpoint=HTTP://h&sse_secret_key={KEY}", r"without TLS"),
        ("s3://kv?ttl=1h", r"'ttl' counts from a chunk's last use, .*; write 'max_age'"),
        ("s3://kv?min_free=5%25", r"option 'min_free': a bucket has no free space"),
        ("s3://kv?connections=0", r"option 'connections'"),
    ],
)
def test_mistakes_are_explained(url, complaint):
    with pytest.raises(ConfigError, match=complaint):
        config(url)


@pytest.mark.parametrize(
    "bucket",
    [
        "s3://kv",
        "kv/chunks",
        "k v",
        "",
        "x" * 256,
        "kv\n",
        "arn:aws:s3:::kv",
        # Requests to these access points are signed in a way that kvtier does not support.
        "arn:aws:s3::123456789012:accesspoint/mfzwi23gnjvgw.mrap",
        "arn:aws:s3-object-lambda:us-west-2:123456789012:accesspoint/kv",
        "arn:aws:s3-outposts:us-west-2:123456789012:outpost/op-01ac5d28a6a232904/accesspoint/kv",
    ],
)
def test_what_is_no_bucket(bucket):
    with pytest.raises(ConfigError, match="option 'bucket'") as caught:
        config("s3:", bucket=bucket)
    assert len(str(caught.value).splitlines()) == 1
    if bucket:
        assert "is not a bucket; write its name alone" in str(caught.value)


@pytest.mark.parametrize("arn", ["arn:aws:s3", "arn:aws-cn:s3"])
@pytest.mark.parametrize("separator", "/:")
def test_an_access_point_is_one(arn, separator):
    bucket = f"{arn}:cn-north-1:123456789012:accesspoint{separator}kv"
    assert config("s3:", bucket=bucket).bucket == bucket


def test_no_mistake_shows_a_secret():
    with pytest.raises(ConfigError) as caught:
        config("s3://kv?secret_access_key=hunter2&session_token=hunter3&sse_secret_key=hunter4")
    assert "hunter" not in str(caught.value)
    for endpoint in ("http://me:hunter2@h", "ftp://me:hunter'2 3@h", "me:hunter2@h"):
        with pytest.raises(ConfigError, match="'access_key_id' and 'secret_access_key'") as caught:
            config("s3://kv", endpoint=endpoint)
        assert "hunter" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["access_key_id", "secret_access_key", "session_token", "region", "sse_kms_key_id"]
)
@pytest.mark.parametrize(
    "value", ["hunter2\r\nx-evil: 1", "hunter2\n", "hunter2\0", "hunter\u20ac2"]
)
def test_what_cannot_be_in_a_header_is_refused(name, value):
    keys = {"access_key_id": "an id", "secret_access_key": "a key"}
    given = {**keys, "sse": "aws:kms", name: value}
    with pytest.raises(ConfigError) as caught:
        config("s3://kv", **given)
    said = f"option '{name}' contains a character that a header cannot hold: a line break, "
    assert said in str(caught.value)
    assert "hunter" not in str(caught.value)
